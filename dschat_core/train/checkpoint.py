"""Checkpoints that are either whole or do not exist.

All ranks write into a temporary folder; every file is hashed from the disk; rank 0 writes `manifest.json` and renames
the folder to `step-N`. A resume takes the newest `step-N` that verifies: rank 0 hashes and decides, the others follow.
DeepSpeed's own `latest` pointer is neither written nor read, and nothing is unpickled before its hash matched.

    step-40/manifest.json                     step, world size, ZeRO stage, identity, state, size and SHA-256 of files
    step-40/model/mp_rank_00_model_states.pt  one folder per engine, in DeepSpeed's format
    committed.json                            the last step committed; proof against a silent restart from 0
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dschat_core.errors import ConfigError, DschatError, IntegrityError, StorageFullError
from dschat_core.train.engine import barrier, broadcast_object, gather_objects, is_main, log, rank, world_size

SCHEMA_VERSION = 1
STEP_FOLDER = re.compile(r"step-(\d+)")
_TEMPORARY = re.compile(r"\.(step-\d+|pruned-\d+)\..+")
_BYTES_PER_PARAMETER = 16  # weights, fp32 master copy and Adam's two moments


def save_checkpoint(
    directory: Path,
    step: int,
    engines: Mapping[str, Any],
    state: Mapping[str, Any],
    *,
    token: str,
    identity: Mapping[str, Any],
) -> Path:
    """Write and commit `directory/step-N`; called by all ranks at the same step.

    Args:
        directory: the stage's checkpoint folder, seen by all ranks.
        step: optimizer steps (ppo: iterations) done.
        engines: DeepSpeed engines by name.
        state: what else an exact resume needs, as JSON values; the same on all ranks.
        token: the attempt's fencing token, in the temporary name.
        identity: what the checkpoint belongs to (stage, artifact key); compared on load.

    Raises:
        StorageFullError: the disk has no room; the partial checkpoint is removed and earlier ones stay.
    """
    final, temporary = directory / f"step-{step}", directory / f".step-{step}.{token}"
    needed = _expected_bytes(engines)
    refusal = None
    if is_main():
        directory.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        if shutil.disk_usage(directory).free < needed:
            refusal = _no_room(directory, needed)
        else:
            temporary.mkdir()
    refusal = broadcast_object(refusal)
    if refusal is not None:
        raise refusal
    try:
        for name, engine in engines.items():
            engine.save_checkpoint(str(temporary), tag=name, save_latest=False)
        barrier()
        entries: dict[str, dict[str, Any]] = {}
        for part in gather_objects(_hash_share(temporary)):
            entries |= part
        if is_main():
            manifest = {
                "schema_version": SCHEMA_VERSION,
                "step": step,
                "token": token,
                "identity": dict(identity),
                "layout": _layout(engines),
                "state": dict(state),
                "files": dict(sorted(entries.items())),
            }
            _write_json(temporary / "manifest.json", manifest)
            _sync_folder(temporary)
            # An older folder of this step failed to verify, or this attempt would not have come here again.
            shutil.rmtree(final, ignore_errors=True)
            os.rename(temporary, final)
            _sync_folder(directory)
            _write_json(directory / "committed.json", {"step": step, "token": token})
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if not isinstance(error, DschatError) and shutil.disk_usage(directory).free < needed:
            raise _no_room(directory, needed) from error
        raise
    barrier()
    return final


def load_newest(
    directory: Path, engines: Mapping[str, Any], *, identity: Mapping[str, Any]
) -> tuple[int, dict[str, Any]] | None:
    """Load the newest checkpoint that verifies into `engines` and return its step and state; None if there is none.

    Called by all ranks. A checkpoint that does not verify is named and passed over.

    Raises:
        IntegrityError: it belongs to another artifact, or checkpoints were committed and none verifies.
        ConfigError: it was written by another number of ranks, ZeRO stage or precision.
    """
    decision: Any = None
    if is_main():
        try:
            decision = _pick(directory, identity, _layout(engines))
        except DschatError as error:
            decision = error
    decision = broadcast_object(decision)
    if isinstance(decision, DschatError):
        raise decision
    if decision is None:
        return None
    folder = directory / f"step-{decision['step']}"
    for name, engine in engines.items():
        path, _ = engine.load_checkpoint(str(folder), tag=name)
        if path is None:
            raise IntegrityError(f"DeepSpeed found no checkpoint {name!r}", where=f"{folder}, rank {rank()}")
    return decision["step"], decision["state"]


def verify(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose every file has the recorded size and hash.

    Raises:
        IntegrityError: naming the first file that is missing, changed, unlisted or a link.
    """
    manifest_path = folder / "manifest.json"
    try:
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
        step, files, state = manifest["step"], manifest["files"], manifest["state"]
        known = manifest["schema_version"] == SCHEMA_VERSION and isinstance(state, dict)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise IntegrityError("the manifest cannot be read", where=str(manifest_path), why=str(error)) from None
    if not known or folder.name != f"step-{step}":
        raise IntegrityError(f"the manifest says step {step}, or is of another version", where=str(manifest_path))
    found = {
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()
    }
    if odd := sorted(found ^ {*files, "manifest.json"}):
        problem = "is missing" if odd[0] in files else "is not in the manifest"
        raise IntegrityError(f"{odd[0]} {problem}", where=str(folder))
    for name, entry in files.items():
        path = folder / name
        if path.is_symlink() or path.stat().st_size != entry["size"] or _sha256(path) != entry["sha256"]:
            raise IntegrityError(f"{name} is not what the manifest says", where=str(path))
    return dict(manifest)


def steps(directory: Path) -> list[int]:
    """Steps of the committed checkpoints in `directory`, oldest first; links and other names do not count."""
    if not directory.is_dir():
        return []
    found = [(path, STEP_FOLDER.fullmatch(path.name)) for path in directory.iterdir()]
    return sorted(int(match[1]) for path, match in found if match and path.is_dir() and not path.is_symlink())


def prune(directory: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints and what killed attempts left half-written."""
    old = steps(directory)
    for step in old[: len(old) - keep] if keep else old:
        # Renamed first: a kill while files are being removed must not leave a damaged `step-N`.
        doomed = directory / f".pruned-{step}.{os.getpid()}"
        os.rename(directory / f"step-{step}", doomed)
    if keep == 0:
        (directory / "committed.json").unlink(missing_ok=True)
    if directory.is_dir():
        for path in directory.iterdir():
            if _TEMPORARY.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)


def _pick(directory: Path, identity: Mapping[str, Any], layout: Mapping[str, Any]) -> dict[str, Any] | None:
    """The manifest to resume from. Raises for what must not end in a restart from step 0."""
    candidates = steps(directory)
    damage = []
    for step in reversed(candidates):
        folder = directory / f"step-{step}"
        try:
            manifest = verify(folder)
        except (IntegrityError, OSError) as error:
            damage.append(f"{folder}: {error}")
            log(f"checkpoint passed over: {folder}: {error}")
            continue
        if manifest["identity"] != dict(identity):
            differing = [k for k in identity if manifest["identity"].get(k) != identity[k]] or ["identity"]
            raise IntegrityError(
                f"the checkpoint belongs to another job: {differing[0]} is "
                f"{manifest['identity'].get(differing[0])!r}, not {identity.get(differing[0])!r}",
                where=str(folder),
                why="the folder was copied, or the job file was changed",
                fix=f"move {directory} away to start from step 0",
            )
        for name, value in layout.items():
            saved = manifest["layout"].get(name)
            if saved != value:
                raise ConfigError(
                    f"the checkpoint has {name}={saved!r}, this job has {value!r}",
                    where=str(folder),
                    why="DeepSpeed's checkpoints fit the layout that wrote them",
                    fix=f"run with {_KEYS.get(name, name)}={saved}, or move {directory} away to start from step 0",
                )
        return manifest
    record = directory / "committed.json"
    if candidates or record.exists():
        raise IntegrityError(
            f"checkpoints were committed in {directory} and none verifies",
            where="; ".join(damage) or str(record),
            why="files were changed or lost after the commit",
            fix=f"restore a step folder, or move {directory} away to start from step 0 on purpose",
        )
    return None


_KEYS = {"world_size": "runtime.ranks_per_node (times num_nodes)", "zero_stage": "runtime.zero_stage"}


def _layout(engines: Mapping[str, Any]) -> dict[str, Any]:
    first = next(iter(engines.values()))
    return {
        "world_size": world_size(),
        "zero_stage": int(first.zero_optimization_stage()),
        "precision": "bf16" if first.bfloat16_enabled() else "fp16" if first.fp16_enabled() else "fp32",
        "engines": list(engines),
    }


def _expected_bytes(engines: Mapping[str, Any]) -> int:
    parameters = [p for engine in engines.values() for p in engine.module.parameters()]
    return _BYTES_PER_PARAMETER * sum(int(getattr(p, "ds_numel", p.numel())) for p in parameters) + 2**20


def _no_room(directory: Path, needed: int) -> StorageFullError:
    free = shutil.disk_usage(directory).free
    return StorageFullError(
        f"a checkpoint needs {needed:,} bytes and {free:,} are free",
        where=str(directory),
        why="the disk is full; earlier checkpoints are kept",
        fix="free space or lower runtime.keep_checkpoints, then run the same command again",
    )


def _hash_share(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and hash of this rank's share of the files, each flushed to the disk."""
    for helper in folder.rglob("*.py"):
        if is_main():
            helper.unlink()  # DeepSpeed's conversion script is code, not data
    barrier()
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    entries = {}
    for path in files[rank() :: world_size()]:
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
        entries[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, "sha256": _sha256(path)}
    return entries


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as handle:
        json.dump(value, handle, indent=1)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temporary, path)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
