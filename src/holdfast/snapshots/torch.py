"""The state of a training in torch, as a tree that a snapshot keeps: model, optimizer, random states.

    with snapshots.save(step) as out:
        out["training"] = state_of(model, optimizer)
    ...
    restore(saved["training"], model, optimizer)

With torch.distributed.checkpoint, `Stager` has `async_save` write its files from the memory of the snapshot, and
`load_into` is to a snapshot what `torch.distributed.checkpoint.load` is to the files.

Each rank keeps the parts that lie on it, and nothing is gathered: this works for plain modules, DDP and FSDP (a part of
a DTensor is its local tensor) and needs no communication. `restore` puts the parts back where they were, so the world
must have as many ranks as the one that saved; state that all ranks share (DDP) can be saved with `replicated=True`.

Only programs import this module: no other part of holdfast imports a framework.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from holdfast.snapshots.api import Snapshots

_LOCAL = "__local__"  # Instead of a DTensor: a dict with its local tensor.


def state_of(model: torch.nn.Module | None = None, optimizer: Any = None, *, rng: bool = True) -> dict[str, Any]:
    """Tensors are not copied here; `save` does that at the end of its block."""
    state: dict[str, Any] = {}
    if model is not None:
        state["model"] = {name: _local(tensor) for name, tensor in _tensors(model)}
        state["extra"] = {name: module.get_extra_state() for name, module in _with_extra_state(model)}
    if optimizer is not None:
        state["optimizer"] = _localized(optimizer.state_dict())
    if rng:
        state["rng"] = rng_state()
    return state


def restore(
    state: Mapping[str, Any], model: torch.nn.Module | None = None, optimizer: Any = None, *, rng: bool = True
) -> None:
    """Raises ValueError if the state is of another model."""
    if model is not None:
        _restore_model(state["model"], state["extra"], model)
    if optimizer is not None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        saved = state["optimizer"]
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        of_each = {number: _distributed(saved["state"][number], param)
                   for number, param in zip(numbers, params, strict=True) if number in saved["state"]}  # fmt: skip
        optimizer.load_state_dict({**saved, "state": {**saved["state"], **of_each}})
    if rng:
        set_rng_state(state["rng"])


class Stager:
    """Of one save: `torch.distributed.checkpoint.async_save(state, ..., async_stager=Stager(snapshots, step))`. The
    state is copied once, into the memory of the snapshot, and committed; the files are written from there while the
    training goes on. Steps, `replicated` and errors are those of `save`."""

    should_synchronize_after_execute = False

    def __init__(self, snapshots: Snapshots, step: int, *, replicated: bool = False) -> None:
        self._snapshots, self._step, self._is_replicated = snapshots, step, replicated

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Called alone it saves a snapshot and writes no files."""
        state = {name: each.state_dict() if _is_stateful(each) else each for name, each in state_dict.items()}
        staged = self._snapshots.stage(self._step, _localized(state), replicated=self._is_replicated)
        return {name: _delocalized(staged[name], each) for name, each in state.items()}

    def synchronize_staging(self) -> None:
        """All is copied when `stage` returns."""

    def close(self) -> None:
        """There is nothing to close: the memory is the spawner's."""


def load_into(state_dict: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Load a snapshot that a `Stager` has saved as `torch.distributed.checkpoint.load` loads files: tensors are changed
    in place, objects with `load_state_dict` are given their state, other values are replaced. Raises ValueError if the
    snapshot lacks a value or has a tensor of another shape."""
    for name, value in state_dict.items():
        target = value.state_dict() if _is_stateful(value) else value
        if name not in saved:
            raise ValueError(f"the snapshot has no {name}")
        loaded = _loaded(target, saved[name], name)
        if _is_stateful(value):
            value.load_state_dict(loaded)
        else:
            state_dict[name] = loaded


def _is_stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _loaded(target: Any, saved: Any, name: str) -> Any:
    """What takes the place of the target: a tensor itself, with other values."""
    if isinstance(target, torch.Tensor):
        _copy(saved[_LOCAL] if hasattr(target, "to_local") else saved, target, name)
        return target
    if isinstance(saved, list):
        parts = dict(enumerate(target)) if isinstance(target, list) else {}
        return [_loaded(parts.get(at), each, f"{name}.{at}") for at, each in enumerate(saved)]
    if not isinstance(saved, dict):
        return saved
    if saved.keys() == {_LOCAL}:
        raise ValueError(f"{name} is a part of a distributed tensor, and the state to load into has no such tensor")
    parts = target if isinstance(target, dict) else {}
    if missing := [key for key in parts if key not in saved]:
        raise ValueError(f"the snapshot has no {name}.{missing[0]}")
    return {key: _loaded(parts.get(key), each, f"{name}.{key}") for key, each in saved.items()}


def _copy(saved: torch.Tensor, tensor: torch.Tensor, name: str) -> None:
    target = _local(tensor)
    if target.shape != saved.shape:
        raise ValueError(f"{name} has the shape {tuple(target.shape)}, not {tuple(saved.shape)}")
    target.copy_(saved)


def _restore_model(saved: Mapping[str, Any], extra: Mapping[str, Any], model: torch.nn.Module) -> None:
    live = dict(_tensors(model))
    if live.keys() != saved.keys():
        odd = sorted(live.keys() ^ saved.keys())
        raise ValueError(f"the snapshot is of another model: {len(odd)} names differ, such as {odd[0]!r}")
    with torch.no_grad():
        for name, tensor in live.items():
            _copy(saved[name], tensor, name)
    for name, module in _with_extra_state(model):
        module.set_extra_state(extra[name])


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    for name, tensor in model.named_buffers():
        yield f"buffer {name}", tensor


def _with_extra_state(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, module in model.named_modules():
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            yield name, module


def _local(tensor: Any) -> torch.Tensor:
    """Its own memory: subclasses such as FSDP's flat parameters are looked through."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return torch.Tensor.detach(local).as_subclass(torch.Tensor)


def _localized(value: Any) -> Any:
    if hasattr(value, "to_local"):
        return {_LOCAL: _local(value)}
    if isinstance(value, dict):
        return {key: _localized(each) for key, each in value.items()}
    return [_localized(each) for each in value] if isinstance(value, list) else value


def _delocalized(staged: Any, like: Any) -> Any:
    """What `_localized` made of `like`, with its local tensors as parts of tensors like the ones that they are of. They
    stay in the memory of the host, whatever device the mesh is of."""
    if hasattr(like, "to_local"):
        names, spec = like.__tensor_flatten__()
        parts = {name: getattr(like, name) for name in names}  # Its local tensor, and the mesh in newer versions.
        parts = {name: staged[_LOCAL] if isinstance(part, torch.Tensor) else part for name, part in parts.items()}
        return type(like).__tensor_unflatten__(parts, spec, like.shape, like.stride())
    if isinstance(like, dict):
        return {key: _delocalized(staged[key], each) for key, each in like.items()}
    return [*map(_delocalized, staged, like)] if isinstance(like, list) else staged


def _distributed(value: Any, like: Any) -> Any:
    """The state of one parameter, where its local tensors are parts of tensors like that parameter."""
    if isinstance(value, dict) and value.keys() == {_LOCAL}:
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            value[_LOCAL].to(like.device), like.device_mesh, like.placements, run_check=False, shape=like.shape,
            stride=like.stride(),
        )  # fmt: skip
    return {key: _distributed(each, like) for key, each in value.items()} if isinstance(value, dict) else value


def rng_state() -> dict[str, Any]:
    """Of torch, its accelerators that are in use, Python, and numpy if it is loaded."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])
