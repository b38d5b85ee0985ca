"""Reads one MoE layer of a block-FP8 safetensors checkpoint.

Two layouts of the experts are known, under `model.language_model.layers.L.mlp` and under
`model.layers.L.mlp`:

- per expert: `experts.E.{gate,up,down}_proj.weight` and `.weight_scale_inv`;
- packed: `experts.{gate_up,down}_proj` and `experts.{gate_up,down}_proj_scale_inv`.

The router is `gate.weight`. Weights are e4m3, scales (which multiply) fp32 or bf16, one per
128 x 128 block.
"""

import operator
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from cute_moe.checkpoint_config import ModelConfig
from cute_moe.checkpoint_files import CheckpointError, CheckpointReader, Shape, describe
from cute_moe.kernels.device.options import type_name
from cute_moe.reference import BLOCK, E4M3

LAYER_PREFIXES = ("model.language_model.layers.{}.mlp", "model.layers.{}.mlp")
SCALE_DTYPES = (torch.float32, torch.bfloat16)
ROUTER_DTYPES = (torch.bfloat16, torch.float32)

PACKED_NAMES = ("gate_up_proj", "down_proj")
SHARED_EXPERT_OPTIONS = ("refuse", "ignore")
SHARED_EXPERT = re.compile(r"shared_experts?(_gate)?\.")
# Tensors beside `mlp` that belong to an MoE layer all the same.
BESIDE_MLP = re.compile(r"block_sparse_moe\.|shared_|residual_mlp\.|.*e_score_correction_bias$")
# Why a tensor that this reader does not know matters: the first pattern that its name matches.
REASONS = (
    (r"e_score_correction_bias$", "a routing with a bias per expert"),
    (r"weight_scale$", "scales that are not weight_scale_inv, one per 128 x 128 block"),
    (r"input_scale$|activation_scale$", "activations with a scale of the checkpoint"),
    (r"\.bias$", "a bias"),
    (r"shared_experts?(_gate)?\.|shared_", "a shared expert"),
    (r"", "this part of an MoE layer"),
)


@dataclass(frozen=True)
class LayerTensors:
    """One MoE layer on one device, as `mono_moe` takes it.

    w_up e4m3 [E, 2N, K] (gate rows, then up rows), s_up [E, 2N/128, K/128], w_down e4m3
    [E, K, N], s_down [E, K/128, N/128], scales fp32 or bf16; router_weight [E, K] or None.
    """

    w_up: torch.Tensor
    s_up: torch.Tensor
    w_down: torch.Tensor
    s_down: torch.Tensor
    router_weight: torch.Tensor | None = None


def load_layer(
    directory: str | Path,
    layer: int,
    device: torch.device | str | int | None = None,
    progress: bool = True,
    shared_expert: str = "refuse",
) -> LayerTensors:
    """Reads layer `layer` to `device` (None: the CPU), with a progress bar on a terminal.

    Every weight goes from the file into its place in the result; there is no second copy of the
    layer at any time. A layer with anything that `LayerTensors` does not hold and that changes its
    result is refused, its shared expert too unless `shared_expert` is "ignore". Raises
    CheckpointError for the checkpoint, TypeError or ValueError for the other arguments.
    """
    layer = layer_index(layer)
    if shared_expert not in SHARED_EXPERT_OPTIONS:
        raise ValueError(f"shared_expert: expected 'refuse' or 'ignore', got {shared_expert!r}")
    target = usable_device("cpu" if device is None else device)
    config = ModelConfig.read(directory)
    config.check_experts()
    with CheckpointReader(directory) as reader:
        prefix = _find_layer(reader, layer)
        packed = any(f"{prefix}.experts.{name}" in reader for name in PACKED_NAMES)
        layout = _Packed if packed else _PerExpert
        _check_names(reader.names, prefix, layout.names)
        if shared_expert == "refuse":
            _check_shared_expert(reader.names, prefix, config)
        source = layout(reader, prefix, config.num_experts())
        with _progress_bar(f"layer {layer}", source.nbytes, progress) as advance:
            return source.read(target, advance)


def usable_device(device: torch.device | str | int) -> torch.device:
    """`device` as torch can use it here; an int is the index of a GPU.

    Raises TypeError for what names no device, ValueError for one that is not there.
    """
    if isinstance(device, bool) or not isinstance(device, (torch.device, str, int)):
        raise TypeError(f"device: expected a torch.device, str or int, got {type_name(device)}")
    try:
        if isinstance(device, int):
            device = f"cuda:{device}"
        return torch.empty(0, device=device).device
    except (AssertionError, RuntimeError) as error:  # torch's words for the absence of CUDA
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"device: expected one that torch can use here, got {str(device)!r}: {reason}"
        ) from error


class _Experts:
    """The experts of one layer in one of the layouts: sizes first, then the tensors."""

    names: re.Pattern[str]  # of its tensors, after the prefix

    def __init__(self, reader: CheckpointReader, prefix: str, stated: int | None) -> None:
        self.reader, self.prefix = reader, prefix
        found, self.n, self.k = self.find_sizes()
        # A count from the tensors alone would not notice that the last experts are missing.
        self.num_experts = found if stated is None else stated
        if found > self.num_experts:
            raise CheckpointError(
                f"{prefix}.experts: expected {stated} experts, as config.json says; got {found}"
            )
        for name, size in (("intermediate", self.n), ("hidden", self.k)):
            if size == 0 or size % BLOCK:
                raise CheckpointError(
                    f"{prefix}.experts: expected the {name} size to be a multiple of {BLOCK}, "
                    f"got {size}"
                )
        self.scale_dtype = self.find_scale_dtype()

    def find_sizes(self) -> Shape:
        """(E, N, K), E by the tensors."""
        raise NotImplementedError

    def find_scale_dtype(self) -> torch.dtype:
        """The dtype that all scales of the layer must have."""
        raise NotImplementedError

    def parts(self, matrix: str) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """Yields (expert, first row, weight, scale) for "up" or "down", in file order."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, scales left out."""
        return self.num_experts * 3 * self.n * self.k

    def read(self, device: torch.device, advance: Callable[[int], None]) -> LayerTensors:
        """Fills new tensors on `device`; calls `advance` with the bytes of each part."""
        w_up, s_up = self._read_matrix("up", (2 * self.n, self.k), device, advance)
        w_down, s_down = self._read_matrix("down", (self.k, self.n), device, advance)
        return LayerTensors(w_up, s_up, w_down, s_down, self._router(device))

    def _read_matrix(
        self, matrix: str, shape: Shape, device: torch.device, advance: Callable[[int], None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights = torch.empty(self.num_experts, *shape, dtype=E4M3, device=device)
        blocks = _scale_shape(shape)
        scales = torch.empty(self.num_experts, *blocks, dtype=self.scale_dtype, device=device)
        for expert, row, weight, scale in self.parts(matrix):
            weights[expert, row : row + weight.shape[0]].copy_(weight)
            scales[expert, row // BLOCK : row // BLOCK + scale.shape[0]].copy_(scale)
            advance(weight.nbytes)
        return weights, scales

    def _router(self, device: torch.device) -> torch.Tensor | None:
        name = f"{self.prefix}.gate.weight"
        if name not in self.reader:
            return None
        # copy=True: what lies on the CPU must outlive the mapped file.
        mapped = self.reader.get(name, ROUTER_DTYPES, (self.num_experts, self.k))
        return mapped.to(device, copy=True)


class _PerExpert(_Experts):
    names = re.compile(r"experts\.\d+\.(gate|up|down)_proj\.weight(_scale_inv)?$")

    def _weight(self, expert: int, name: str, shape: Shape | None = None) -> torch.Tensor:
        return self.reader.get(f"{self.prefix}.experts.{expert}.{name}.weight", (E4M3,), shape)

    def _scale_name(self, expert: int, name: str) -> str:
        return f"{self.prefix}.experts.{expert}.{name}.weight_scale_inv"

    def find_sizes(self) -> Shape:
        pattern = re.compile(re.escape(f"{self.prefix}.experts.") + r"(\d+)\.")
        found = {int(match[1]) for name in self.reader.names if (match := pattern.match(name))}
        first = self._weight(0, "gate_proj")
        if first.dim() != 2:
            raise CheckpointError(
                f"{self.prefix}.experts.0.gate_proj.weight: expected [N, K], got "
                f"{list(first.shape)}"
            )
        return max(found) + 1, *first.shape

    def find_scale_dtype(self) -> torch.dtype:
        return self.reader.get(self._scale_name(0, "gate_proj"), SCALE_DTYPES).dtype

    def parts(self, matrix: str) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        pieces = {
            "up": (("gate_proj", 0, (self.n, self.k)), ("up_proj", self.n, (self.n, self.k))),
            "down": (("down_proj", 0, (self.k, self.n)),),
        }
        for expert in range(self.num_experts):
            for name, row, shape in pieces[matrix]:
                weight = self._weight(expert, name, shape)
                scale = self.reader.get(
                    self._scale_name(expert, name), (self.scale_dtype,), _scale_shape(shape)
                )
                yield expert, row, weight, scale


class _Packed(_Experts):
    names = re.compile(r"experts\.(gate_up|down)_proj(_scale_inv)?$")

    def _tensors(self, name: str, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        full = f"{self.prefix}.experts.{name}"
        return self.reader.get(full, (E4M3,), shape), self.reader.get(
            f"{full}_scale_inv", (self.scale_dtype,), (shape[0], *_scale_shape(shape[1:]))
        )

    def find_sizes(self) -> Shape:
        name = f"{self.prefix}.experts.gate_up_proj"
        first = self.reader.get(name, (E4M3, torch.bfloat16, torch.float16, torch.float32))
        if first.dtype != E4M3:
            raise CheckpointError(
                f"{name}: expected block-FP8 weights (float8_e4m3fn with {name}_scale_inv), got "
                f"{describe((first.dtype,), tuple(first.shape))}: this is an unquantised "
                "checkpoint, take the FP8 release of the model"
            )
        if first.dim() != 3 or first.shape[1] % 2:
            raise CheckpointError(f"{name}: expected [E, 2N, K], got {list(first.shape)}")
        return first.shape[0], first.shape[1] // 2, first.shape[2]

    def find_scale_dtype(self) -> torch.dtype:
        name = f"{self.prefix}.experts.gate_up_proj_scale_inv"
        return self.reader.get(name, SCALE_DTYPES).dtype

    def parts(self, matrix: str) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        if matrix == "up":
            weights, scales = self._tensors("gate_up_proj", self.num_experts, 2 * self.n, self.k)
        else:
            weights, scales = self._tensors("down_proj", self.num_experts, self.k, self.n)
        for expert in range(self.num_experts):
            yield expert, 0, weights[expert], scales[expert]


def layer_index(layer: int) -> int:
    """`layer` as an int. Raises ValueError for what is no whole number >= 0."""
    try:
        index = -1 if isinstance(layer, bool) else operator.index(layer)
    except TypeError:
        index = -1
    if index < 0:
        raise ValueError(f"layer: expected an int >= 0, got {layer!r}")
    return index


def _find_layer(reader: CheckpointReader, layer: int) -> str:
    """The prefix under which the experts of `layer` lie."""
    prefixes = [prefix.format(layer) for prefix in LAYER_PREFIXES]
    for prefix in prefixes:
        if any(name.startswith(f"{prefix}.experts.") for name in reader.names):
            return prefix
    bias = re.compile(rf"(.*\.)?layers\.{layer}\..*e_score_correction_bias$")
    for name in filter(bias.match, reader.names):
        raise _unsupported(name)
    raise CheckpointError(
        f"layer {layer}: expected tensors under {' or '.join(p + '.experts' for p in prefixes)}; "
        f"{reader.directory} holds {_moe_layers(reader.names)}"
    )


def _moe_layers(names: list[str]) -> str:
    """What layers lie where, such as "MoE layers 0-2, 5 under model.layers.L.mlp.experts"."""
    pattern = re.compile(r"((?:.*?\.)?)(\d+)\.((?:\w+\.)*?experts)\.")
    layers: dict[str, set[int]] = {}
    for match in filter(None, map(pattern.match, names)):
        layers.setdefault(f"{match[1]}L.{match[3]}", set()).add(int(match[2]))
    if not layers:
        return "no MoE layer"
    places = (f"{_ranges(sorted(found))} under {place}" for place, found in layers.items())
    return f"MoE layers {' and '.join(places)}"


def _check_names(names: list[str], prefix: str, experts: re.Pattern[str]) -> None:
    """Raises CheckpointError for a tensor of the layer that nothing here would read."""
    mlp, layer = f"{prefix}.", prefix.removesuffix("mlp")
    for name in names:
        if name.startswith(mlp):
            rest = name.removeprefix(mlp)
            patterns = (experts, SHARED_EXPERT)
            known = rest == "gate.weight" or any(p.match(rest) for p in patterns)
        else:
            known = not (name.startswith(layer) and BESIDE_MLP.match(name.removeprefix(layer)))
        if not known:
            raise _unsupported(name)


def _check_shared_expert(names: list[str], prefix: str, config: ModelConfig) -> None:
    advice = 'shared_expert="ignore" reads the layer without it'
    for name in names:
        if name.startswith(f"{prefix}.") and SHARED_EXPERT.match(name.removeprefix(f"{prefix}.")):
            raise CheckpointError(f"{_unsupported(name)}; {advice}")
    try:
        config.check_shared_expert()
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {advice}") from error


def _unsupported(name: str) -> CheckpointError:
    reason = next(text for pattern, text in REASONS if re.search(pattern, name))
    return CheckpointError(f"{name}: {reason} is not supported, and the result would lack it")


def _scale_shape(shape: Shape) -> Shape:
    return tuple(size // BLOCK for size in shape)


def _ranges(values: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


@contextmanager
def _progress_bar(title: str, total: int, wanted: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function that adds bytes; draws on stderr, and only on a terminal."""
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    # A closed stderr is None.
    shown = wanted and sys.stderr is not None and sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task(title, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)
