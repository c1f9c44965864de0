"""State of submodules besides the values of parameters: buffers, counters, caches, lists, objects, random generators.

All of it is noted before a batch is computed beside training, and put back afterwards: the same objects, with the
contents that they had. What was not changed is not written to.
"""

from __future__ import annotations

import copy
import random
import threading
import types
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, MutableMapping
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megasdc.tensors.bits import as_bits

MOST = 1 << 20
"""Largest number of objects that are noted."""
OF_HOOKS = frozenset(vars(nn.Module())) - {"training", "_parameters", "_buffers", "_non_persistent_buffers_set"}
"""Attributes of any submodule that forward passes do not change, hooks above all, which are attached meanwhile."""
NOT_OURS = ("torch", "deepspeed", "accelerate", "threading", "logging", "concurrent", "multiprocessing", "queue")
"""Packages whose objects, other than submodules, belong to the training around the model."""
LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Thread, threading.Condition, threading.Event)
"""Types of attributes that mark an object as shared with other threads: it is left alone."""
PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size, type, Enum)
CODE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, property, partial)
_ABSENT = object()


class NotKept(RuntimeError):
    """A submodule uses an object that cannot be put back."""


@contextmanager
def preserve_attributes(model: nn.Module) -> Iterator[None]:
    """Context in which a model may be computed; at its end all state of the submodules is as it was.

    Raises:
        NotKept: inside, where a submodule uses a generator of Python, which cannot be put back.

    Sync: waits for the device, where tensors are kept.
    """
    kept = _AttributeCopies(model)
    try:
        yield
    finally:
        kept.restore()


class _Untouchable:
    """Stand-in for an object that cannot be put back; any use of it raises ``NotKept``."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __getattr__(self, name: str) -> Any:
        raise NotKept(self._what)

    def __next__(self) -> Any:
        raise NotKept(self._what)

    def __iter__(self) -> Any:
        raise NotKept(self._what)


class _AttributeCopies:
    """Copy of the state of a model's submodules, each object once."""

    def __init__(self, model: nn.Module) -> None:
        self._seen: dict[int, Any] = {}
        self._undo: list[Callable[[], object]] = []
        self._waiting: deque[tuple[str, Any]] = deque()
        self._copies: dict[int, Any] = {}
        self._originals: dict[int, Any] = {}
        classes: dict[type, None] = {}
        for fqn, module in model.named_modules():
            self._waiting.append((f"submodule {fqn}" if fqn else "the model", module))
            classes |= dict.fromkeys(type(module).__mro__)
        for kind in classes:
            if kind.__module__.partition(".")[0] not in (*NOT_OURS, "transformers", "builtins"):
                self._class(kind)
        while self._waiting and len(self._seen) < MOST:
            self._copy(*self._waiting.popleft())

    def restore(self) -> None:
        """Give every object its contents again; an error with one is raised after all others are put back."""
        errors = []
        with torch.no_grad():
            for undo in self._undo:
                try:
                    undo()
                except Exception as error:  # of any class: objects are not ours
                    errors.append(error)
        if errors:
            raise errors[0]

    def _later(self, where: str, value: Any) -> Any:
        """Queue a value to be noted; returns the value to put back in its place: itself, or an iterator's copy."""
        if isinstance(value, (*PLAIN, *CODE)):
            return value
        if isinstance(value, Iterator) and not hasattr(value, "__dict__"):
            return self._iterator(value)
        self._waiting.append((where, value))
        return value

    def _back(self, value: Any) -> Any:
        """Value that is put back for a noted one: an iterator that was not moved on stays, since others may hold it."""
        original = self._originals.get(id(value), value)
        return value if original is not value and _moved(original, value) else original

    def _copy(self, where: str, value: Any) -> None:
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value  # so that no other object gets its place
        if isinstance(value, nn.Module):
            self._module(where, value)
        elif isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter):
                self._tensor(value)
        elif isinstance(value, (dict, types.MappingProxyType)):
            if isinstance(value, dict):
                self._mapping(where, value)
        elif isinstance(value, (list, deque)):
            self._sequence(where, value)
        elif isinstance(value, set):
            self._set(value)
        elif isinstance(value, (tuple, frozenset)):
            for one in value:
                self._later(where, one)
        elif isinstance(value, types.MethodType):
            self._later(where, value.__self__)
        elif (state := _state_of(value)) is not None:
            self._undo.append(state)
        elif not _is_shared(value):
            self._object(where, value)

    # --- what holds others --------------------------------------------------------------------------------------------

    def _module(self, where: str, module: nn.Module) -> None:
        self._mapping(where, module._parameters)
        self._mapping(where, module._buffers)
        self._attributes(where, vars(module), OF_HOOKS | {"_parameters", "_buffers"})

    def _object(self, where: str, value: Any) -> None:
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            self._attributes(where, own, frozenset())
        for kind in type(value).__mro__:
            slots = vars(kind).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                self._slot(where, value, vars(kind).get(name))

    def _slot(self, where: str, value: Any, slot: Any) -> None:
        if not isinstance(slot, types.MemberDescriptorType):
            return
        held = slot.__get__(value) if _has(slot, value) else _ABSENT
        noted = held if held is _ABSENT else self._later(where, held)

        def undo() -> None:
            wanted = self._back(noted)
            if wanted is _ABSENT and _has(slot, value):
                slot.__delete__(value)
            elif wanted is not _ABSENT and (not _has(slot, value) or slot.__get__(value) is not wanted):
                slot.__set__(value, wanted)

        self._undo.append(undo)

    def _class(self, kind: type) -> None:
        """Note the attributes of a class that are values."""
        kept = {name: self._later(kind.__qualname__, value) for name, value in _values_of(kind).items()}

        def undo() -> None:
            now = _values_of(kind)
            for name in now.keys() - kept:
                delattr(kind, name)
            for name, value in kept.items():
                if now.get(name, _ABSENT) is not (wanted := self._back(value)):
                    setattr(kind, name, wanted)

        self._undo.append(undo)

    def _attributes(self, where: str, own: MutableMapping[str, Any], skipped: Collection[str]) -> None:
        kept = {}
        for name in [one for one in own if one not in skipped]:
            value = own[name]
            kept[name] = self._later(where, value)
            if isinstance(value, types.GeneratorType):
                what = f"{where} uses its attribute {name}, a generator, which nobody can put back: keep a number"
                own[name] = _Untouchable(what)

        def undo() -> None:
            for name in [one for one in own if one not in skipped and one not in kept]:
                del own[name]
            for name, value in kept.items():
                if own.get(name, _ABSENT) is not (wanted := self._back(value)):
                    own[name] = wanted

        self._undo.append(undo)

    def _mapping(self, where: str, own: dict[Any, Any]) -> None:
        kept = [(key, self._later(where, value)) for key, value in own.items()]
        base: Any = OrderedDict if isinstance(own, OrderedDict) else dict  # a class of its own may do more

        def undo() -> None:
            wanted = [(key, self._back(value)) for key, value in kept]
            if not _same(list(own.items()), wanted):
                base.clear(own)
                for key, value in wanted:
                    base.__setitem__(own, key, value)

        self._undo.append(undo)

    def _sequence(self, where: str, own: list[Any] | deque[Any]) -> None:
        kept = [self._later(where, value) for value in own]
        base: Any = deque if isinstance(own, deque) else list

        def undo() -> None:
            wanted = list(map(self._back, kept))
            if len(own) != len(wanted) or any(one is not other for one, other in zip(own, wanted, strict=True)):
                base.clear(own)
                base.extend(own, wanted)

        self._undo.append(undo)

    def _set(self, own: set[Any]) -> None:
        kept = set(own)

        def undo() -> None:
            if set(own) != kept:
                set.clear(own)
                set.update(own, kept)

        self._undo.append(undo)

    # --- what holds values --------------------------------------------------------------------------------------------

    def _tensor(self, tensor: Tensor) -> None:
        odd = tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta
        if odd or type(tensor) is not Tensor:
            return  # which is replaced, not written to
        memory = tensor.detach()  # a resized one, or one that was given other data, has another
        alone = _without_repeats(memory)
        content = alone.clone()

        def undo() -> None:
            now, size = tensor.detach(), content.untyped_storage().nbytes()
            if (now.data_ptr(), now.shape, now.stride()) != (memory.data_ptr(), memory.shape, memory.stride()):
                if memory.untyped_storage().nbytes() < size:
                    memory.untyped_storage().resize_(size)
                tensor.data = memory
            if not equal_bits(alone, content):
                with torch.inference_mode(alone.is_inference()):
                    alone.copy_(content)

        self._undo.append(undo)

    def _iterator(self, value: Any) -> Any:
        """Copy of an iterator, to put in its place if it is moved on; the iterator itself where it cannot be copied."""
        if isinstance(value, types.GeneratorType) or id(value) in self._copies:
            return self._copies.get(id(value), value)
        self._seen[id(value)] = value
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                self._copies[id(value)] = copied = copy.copy(value)
                self._originals[id(copied)] = value
        except Exception:  # of any class: an iterator of somebody's, which is taken for one that is not moved on
            self._copies[id(value)] = value
        return self._copies[id(value)]


def _state_of(value: Any) -> Callable[[], object] | None:
    """Function that gives a random generator or an array its present state again; None: the value is neither."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", copy.deepcopy(value.bit_generator.state))
    if isinstance(value, bytearray):
        return partial(value.__setitem__, slice(None), bytes(value))
    if isinstance(value, np.ndarray):
        content = value.copy()
        return lambda: None if value.tobytes() == content.tobytes() else np.copyto(value, content)
    return None


def _is_shared(value: Any) -> bool:
    """Whether an object belongs to the training around the model, or to several threads."""
    if type(value).__module__.partition(".")[0] in NOT_OURS:
        return True
    own = getattr(value, "__dict__", None)
    return isinstance(own, dict) and any(isinstance(one, LOCKS) for one in own.values())


def _values_of(kind: type) -> dict[str, Any]:
    return {
        name: one
        for name, one in vars(kind).items()
        if not (name.startswith("__") or name.startswith("_abc_") or callable(one) or hasattr(one, "__get__"))
    }


def _has(slot: Any, value: Any) -> bool:
    try:
        slot.__get__(value)
    except AttributeError:
        return False
    return True


def _moved(iterator: Any, before: Any) -> bool:
    """Whether an iterator was moved on since its copy ``before`` was made."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return bool(iterator.__reduce__() != before.__reduce__())
    except Exception:  # of any class: what is in it may not be comparable
        return True


def _same(now: list[tuple[Any, Any]], kept: list[tuple[Any, Any]]) -> bool:
    """Whether pairs are of the same objects, in the same order."""
    pairs = zip(now, kept, strict=False)
    return len(now) == len(kept) and all(one[0] is two[0] and one[1] is two[1] for one, two in pairs)


def _without_repeats(tensor: Tensor) -> Tensor:
    """The elements of an expanded tensor that have memory of their own."""
    for place, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[place] > 1:
            tensor = tensor.narrow(place, 0, 1)
    return tensor


def equal_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one type and shape have the same bits."""
    pair = [each.resolve_neg().resolve_conj() for each in (one, other)]
    pair = [torch.view_as_real(each) if each.is_complex() else each for each in pair]
    return torch.equal(as_bits(pair[0]), as_bits(pair[1]))
