"""All rows of a data set between reading and writing: texts on disk, what decides about them in columns.

A million short dialogues take about 80 MB of memory here, and a gigabyte of disk.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson

from dschat_core.config import Dataset
from dschat_core.data.checking import CheckedBlock
from dschat_core.data.schemas import Row, row_texts


class Spool:
    """Grows block by block; `close()` makes the columns and texts readable.

    Attributes (after `close`), each with one entry per row, in the order of the files' lines:
        file: index into `files`, int32; line: int64.
        heldout, dropped: bool.
        split, question: uint64, see `CheckedBlock`.
        keys: uint64 (rows, 2); bands: uint64 (rows, bands), on disk; widths: uint8. See `gates.duplicates`.
        forms: the rows as duplicates are compared, by index.
    """

    def __init__(self, folder: Path, kind: Dataset) -> None:
        self.kind: Dataset = kind
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._paths = {name: folder / name for name in ("rows", "forms", "bands")}
        self._open: dict[str, BinaryIO] = {name: path.open("wb") for name, path in self._paths.items()}
        self._columns: dict[str, list[np.ndarray]] = {}
        self._num_bands = 1
        self.files: list[str] = []

    def add(self, block: CheckedBlock, file: str, *, heldout: bool) -> None:
        """Append the rows of the next block."""
        if not self.files or self.files[-1] != file:
            self.files.append(file)
        count = len(block.row_sizes)
        self._open["rows"].write(block.rows)
        self._open["forms"].write(block.forms)
        self._open["bands"].write(np.ascontiguousarray(block.signatures.bands).data)
        self._num_bands = block.signatures.bands.shape[1]
        columns = {
            "file": np.full(count, len(self.files) - 1, dtype=np.int32),
            "line": block.line_numbers,
            "heldout": np.full(count, heldout),
            "dropped": block.dropped,
            "split": block.split,
            "question": block.question,
            "keys": block.signatures.keys,
            "widths": block.signatures.widths,
            "row_sizes": block.row_sizes,
            "form_sizes": block.form_sizes,
        }
        for name, values in columns.items():
            self._columns.setdefault(name, []).append(values)

    def close(self) -> None:
        """No more rows will come."""
        for file in self._open.values():
            file.close()
        empty = {"file": np.int32, "heldout": bool, "dropped": bool, "split": np.uint64, "question": np.uint64}

        def joined(name: str) -> np.ndarray:
            parts = self._columns.pop(name, [])
            return np.concatenate(parts) if parts else np.empty(0, dtype=empty.get(name, np.int64))

        self.file, self.line = joined("file"), joined("line")
        self.heldout, self.dropped = joined("heldout"), joined("dropped")
        self.split, self.question = joined("split"), joined("question")
        self.keys, self.widths = joined("keys").reshape(-1, 2).astype(np.uint64), joined("widths").astype(np.uint8)
        self._row_ends = np.concatenate([[0], np.cumsum(joined("row_sizes"))])
        self._rows = _mapped(self._paths["rows"])
        self.forms = _Forms(self._paths["forms"], np.concatenate([[0], np.cumsum(joined("form_sizes"))]))
        self.bands = (
            np.memmap(self._paths["bands"], dtype=np.uint64, mode="r", shape=(len(self), self._num_bands))
            if len(self)
            else np.empty((0, self._num_bands), dtype=np.uint64)
        )

    def __len__(self) -> int:
        return len(self.line)

    def place(self, row: int) -> dict[str, Any]:
        """{file, line} of a row."""
        return {"file": self.files[self.file[row]], "line": int(self.line[row])}

    def data(self, start: int, end: int) -> bytes:
        """The JSON lines of rows start … end - 1."""
        return self._rows[self._row_ends[start] : self._row_ends[end]]

    def row(self, row: int) -> Row:
        """A row, parsed."""
        return orjson.loads(self.data(row, row + 1))

    def text(self, row: int) -> str:
        """Everything said in a row, one turn a line."""
        return "\n".join(row_texts(self.kind, self.row(row)))

    def chunks(self, max_bytes: int = 2**21) -> Iterator[tuple[int, int]]:
        """All rows as ranges of about so many bytes, at least one row each."""
        start = 0
        while start < len(self):
            end = int(np.searchsorted(self._row_ends, self._row_ends[start] + max_bytes, side="right")) - 1
            end = max(end, start + 1)
            yield start, end
            start = end

    def write(self, chosen: np.ndarray, file: BinaryIO) -> int:
        """Copy the chosen rows, bool (rows,), to a file; returns how many."""
        edges = np.flatnonzero(np.diff(chosen.astype(np.int8), prepend=0, append=0))
        for start, end in edges.reshape(-1, 2).tolist():
            file.write(self.data(start, end))
        return int(chosen.sum())

    def discard(self) -> None:
        """Remove the files from disk."""
        for path in self._paths.values():
            with suppress(FileNotFoundError):
                path.unlink()


class _Forms:
    def __init__(self, path: Path, ends: np.ndarray) -> None:
        self._bytes, self._ends = _mapped(path), ends

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, row: int) -> str:
        return self._bytes[self._ends[row] : self._ends[row + 1]].decode("utf-8")


def _mapped(path: Path) -> mmap.mmap | bytes:
    if not path.stat().st_size:
        return b""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
