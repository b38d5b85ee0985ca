"""Reads one MoE layer of a block-FP8 safetensors checkpoint.

Two layouts of the experts are known, under `model.language_model.layers.L.mlp` and under
`model.layers.L.mlp`:

- per expert: `experts.E.{gate,up,down}_proj.weight` and `.weight_scale_inv`;
- packed: `experts.{gate_up,down}_proj` and `experts.{gate_up,down}_proj_scale_inv`.

The router is `gate.weight`. Weights are e4m3, scales (which multiply) fp32 or bf16, one per
128 x 128 block.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from safetensors import SafetensorError, safe_open

from cute_moe.reference import BLOCK, E4M3

LAYER_PREFIXES = ("model.language_model.layers.{}.mlp", "model.layers.{}.mlp")
INDEX_NAME = "model.safetensors.index.json"
SCALE_DTYPES = (torch.float32, torch.bfloat16)
ROUTER_DTYPES = (torch.bfloat16, torch.float32)

PACKED_NAMES = ("gate_up_proj", "down_proj")

Shape = tuple[int, ...]


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


class CheckpointError(ValueError):
    """A checkpoint that cannot be read: the text names the tensor and what was expected."""


class CheckpointReader:
    """Tensors of a checkpoint directory by name; a context manager that keeps shards mapped."""

    def __init__(self, directory: str | Path) -> None:
        """Reads the index; raises CheckpointError when there is neither an index nor a file."""
        self.directory = Path(directory)
        self._open_files = ExitStack()
        self._files: dict[Path, Any] = {}
        self._place = self._find_tensors()

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(self, *error: object) -> None:
        self._files.clear()
        self._open_files.close()

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._place)

    def __contains__(self, name: str) -> bool:
        return name in self._place

    def get(
        self, name: str, dtypes: tuple[torch.dtype, ...], shape: Shape | None = None
    ) -> torch.Tensor:
        """The tensor on the CPU, mapped from its file and not read yet.

        Raises CheckpointError when it is missing, or when its dtype or shape is another one.
        """
        expected = _describe(dtypes, shape)
        if name not in self._place:
            raise CheckpointError(f"{name}: not in {self.directory}; expected {expected}")
        path = self._place[name]
        try:
            tensor = self._file(path).get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{name}: cannot be read from {path}: {error}") from error
        if tensor.dtype not in dtypes or shape not in (None, tuple(tensor.shape)):
            got = _describe((tensor.dtype,), tuple(tensor.shape))
            raise CheckpointError(f"{name}: expected {expected}, got {got}, in {path}")
        return tensor

    def _find_tensors(self) -> dict[str, Path]:
        """Tensor name -> file, from the index or else from the headers of the files."""
        index = self.directory / INDEX_NAME
        if index.is_file():
            weight_map = _read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise CheckpointError(f"{index}: expected an object under weight_map")
            return {name: self.directory / file for name, file in weight_map.items()}
        files = sorted(self.directory.glob("*.safetensors"))
        if not files:
            raise CheckpointError(
                f"{self.directory}: expected {INDEX_NAME} or a .safetensors file, found neither"
            )
        return {name: path for path in files for name in self._file(path).keys()}  # noqa: SIM118

    def _file(self, path: Path) -> Any:
        if path not in self._files:
            if not path.is_file():
                raise CheckpointError(f"{path}: named by {INDEX_NAME}, but there is no such file")
            try:
                opened = safe_open(path, framework="pt", device="cpu")
            except SafetensorError as error:
                raise CheckpointError(f"{path}: not a safetensors file: {error}") from error
            self._files[path] = self._open_files.enter_context(opened)
        return self._files[path]


def load_layer(
    directory: str | Path,
    layer: int,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> LayerTensors:
    """Reads layer `layer` to `device` (None: the CPU), with a progress bar on a terminal.

    Every weight goes from the file into its place in the result; there is no second copy of the
    layer at any time. Raises CheckpointError.
    """
    config = read_config(directory)
    _check_block_size(config)
    with CheckpointReader(directory) as reader:
        prefix = _find_layer(reader, layer)
        packed = any(f"{prefix}.experts.{name}" in reader for name in PACKED_NAMES)
        source = (_Packed if packed else _PerExpert)(reader, prefix, _expert_count(config))
        with _progress_bar(f"layer {layer}", source.nbytes, progress) as advance:
            return source.read(torch.device(device or "cpu"), advance)


def read_config(directory: str | Path) -> dict[str, Any]:
    """`config.json` with the fields of its `text_config` on top; {} where there is no such file."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        return {}
    config = _read_json(path)
    return {**config, **(config.get("text_config") or {})}


class _Experts:
    """The experts of one layer in one of the layouts: sizes first, then the tensors."""

    def __init__(self, reader: CheckpointReader, prefix: str, stated_experts: int) -> None:
        self.reader, self.prefix = reader, prefix
        self.stated_experts = stated_experts  # by config.json; 0 when it does not say
        self.num_experts, self.n, self.k = self.find_sizes()
        for name, size in (("intermediate", self.n), ("hidden", self.k)):
            if size == 0 or size % BLOCK:
                raise CheckpointError(
                    f"{prefix}.experts: expected the {name} size to be a multiple of {BLOCK}, "
                    f"got {size}"
                )
        self.scale_dtype = self.find_scale_dtype()

    def find_sizes(self) -> Shape:
        """(E, N, K)."""
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
        # A count from the names alone would not notice that the last experts are missing.
        return self.stated_experts or max(found) + 1, *first.shape

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
                f"{_describe((first.dtype,), tuple(first.shape))}: this is an unquantised "
                "checkpoint, take the FP8 release of the model"
            )
        if first.dim() != 3 or first.shape[1] % 2:
            raise CheckpointError(f"{name}: expected [E, 2N, K], got {list(first.shape)}")
        return self.stated_experts or first.shape[0], first.shape[1] // 2, first.shape[2]

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


def _find_layer(reader: CheckpointReader, layer: int) -> str:
    """The prefix under which the experts of `layer` lie."""
    prefixes = [prefix.format(layer) for prefix in LAYER_PREFIXES]
    for prefix in prefixes:
        if any(name.startswith(f"{prefix}.experts.") for name in reader.names):
            return prefix
    found = {re.search(r"layers\.(\d+)\.mlp\.experts\.", name) for name in reader.names}
    layers = sorted({int(match[1]) for match in found if match})
    held = f"MoE layers {_ranges(layers)}" if layers else "no MoE layer"
    raise CheckpointError(
        f"layer {layer}: expected tensors under {' or '.join(p + '.experts' for p in prefixes)}; "
        f"{reader.directory} holds {held}"
    )


def _expert_count(config: dict[str, Any]) -> int:
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return next((int(config[name]) for name in names if config.get(name)), 0)


def _check_block_size(config: dict[str, Any]) -> None:
    size = (config.get("quantization_config") or {}).get("weight_block_size", [BLOCK, BLOCK])
    if size != [BLOCK, BLOCK]:
        raise CheckpointError(
            f"config.json: expected weight_block_size [{BLOCK}, {BLOCK}], got {size}"
        )


def _scale_shape(shape: Shape) -> Shape:
    return tuple(size // BLOCK for size in shape)


def _describe(dtypes: tuple[torch.dtype, ...], shape: Shape | None) -> str:
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return names if shape is None else f"{names} {list(shape)}"


def _ranges(values: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return found


@contextmanager
def _progress_bar(title: str, total: int, wanted: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function that adds bytes; draws on stderr, and only on a terminal."""
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    shown = wanted and sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task(title, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)
