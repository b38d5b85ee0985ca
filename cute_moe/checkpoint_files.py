"""The files of a safetensors checkpoint: which tensor lies where, and its checked text files."""

import json
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from cute_moe.host.check import dtype_name
from cute_moe.kernels.device.options import type_name

INDEX_NAME = "model.safetensors.index.json"

Shape = tuple[int, ...]


class CheckpointError(ValueError):
    """A checkpoint that cannot be read: the text names the tensor or key and what was expected."""


class CheckpointReader:
    """Tensors of a checkpoint directory by name; a context manager that keeps shards mapped."""

    def __init__(self, directory: str | Path) -> None:
        """Reads the index; raises CheckpointError when there is neither an index nor a file."""
        self.directory = checkpoint_path(directory)
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
        expected = describe(dtypes, shape)
        if name not in self._place:
            raise CheckpointError(f"{name}: not in {self.directory}; expected {expected}")
        path = self._place[name]
        try:
            tensor = self._file(path).get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{name}: cannot be read from {path}: {error}") from error
        if tensor.dtype not in dtypes or shape not in (None, tuple(tensor.shape)):
            got = describe((tensor.dtype,), tuple(tensor.shape))
            raise CheckpointError(f"{name}: expected {expected}, got {got}, in {path}")
        return tensor

    def _find_tensors(self) -> dict[str, Path]:
        """Tensor name -> file, from the index or else from the headers of the files."""
        index = self.directory / INDEX_NAME
        if index.exists():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise CheckpointError(f"{index}: expected an object under weight_map")
            for name, file in weight_map.items():
                _check_entry(index, name, file)
            return {name: self.directory / file for name, file in weight_map.items()}
        files = sorted(self.directory.glob("*.safetensors"))
        if not files:
            raise CheckpointError(
                f"{self.directory}: expected {INDEX_NAME} or a .safetensors file, found neither"
            )
        place: dict[str, Path] = {}
        for path in files:
            for name in self._file(path).keys():  # noqa: SIM118
                if name in place:
                    raise CheckpointError(
                        f"{name}: expected in one file, or an {INDEX_NAME} that says in which; "
                        f"got it in {place[name]} and in {path}"
                    )
                place[name] = path
        return place

    def _file(self, path: Path) -> Any:
        if path not in self._files:
            if not path.exists():
                raise CheckpointError(f"{path}: named by {INDEX_NAME}, but there is no such file")
            try:
                opened = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: not a safetensors file: {error}") from error
            self._files[path] = self._open_files.enter_context(opened)
        return self._files[path]


def checkpoint_path(directory: str | Path) -> Path:
    """`directory` as a Path. Raises TypeError for what is no path, CheckpointError for no folder.

    Every text names a folder: the empty one, which a Path takes for the current folder, is refused.
    """
    if not isinstance(directory, (str, Path)):
        raise TypeError(f"directory: expected a str or a Path, got {type_name(directory)}")
    if directory == "":
        raise CheckpointError("directory: expected the folder of a checkpoint, got ''")
    path = Path(directory)
    if not path.is_dir():
        got = "a file" if path.exists() else "nothing there"
        raise CheckpointError(f"{path}: expected the folder of a checkpoint, got {got}")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; CheckpointError when it cannot be read or holds another thing."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return found


def describe(dtypes: tuple[torch.dtype, ...], shape: Shape | None) -> str:
    """A tensor in words, such as "float32 or bfloat16 [4, 256]"."""
    names = " or ".join(dtype_name(dtype) for dtype in dtypes)
    return names if shape is None else f"{names} {list(shape)}"


def _check_entry(index: Path, name: str, file: object) -> None:
    """Raises CheckpointError unless `file` names a file inside the checkpoint."""
    inside = isinstance(file, str) and file not in ("", ".")
    if inside:
        path = PurePosixPath(str(file))
        inside = not path.is_absolute() and ".." not in path.parts
    if not inside:
        raise CheckpointError(
            f"{index}: weight_map: {name}: expected the name of a file in this folder, got {file!r}"
        )
