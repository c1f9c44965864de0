"""How is a checkpoint of a 2x2x2 run harmed at a known place? Every harm says what has to be found.

Where elements lie is computed here with NumPy from the maps that DeepSpeed puts into its files, not with megasdc.
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megasdc.checkpoint.views import flatten

SLOTS = {"master": "fp32", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_LAYERS = "layer_0[02-9]*.pt"
"""Without the layer of positions, which has no parameters here."""
_INTEGERS = {2: torch.int16, 4: torch.int32}
_NAME = re.compile(r"bf16_zero_pp_rank_(\d)_mp_rank_(\d\d)_optim_states.pt|layer_(\d\d)-model_(\d\d)-model_states.pt")


@dataclass
class Expected:
    """What a comparison must say.

    Attributes:
        patterns: allowed ones.
        files: that pieces must lie in, and no other.
        ranks: that must own them.
        tensor: (fqn, slot) of the only finding; null: any in these files, at least one.
        first: index of the first element that differs; null: not checked.
        last: of the last.
        detail: text in the detail.
    """

    patterns: set[str]
    files: set[str]
    ranks: set[int]
    tensor: tuple[str, str] | None = None
    first: list[int] | None = None
    last: list[int] | None = None
    count: int | None = None
    detail: str = ""


@dataclass
class Place:
    """A run of elements of one logical tensor in one file: the tensor it is in, and the index of each element."""

    file: Path
    rank: int
    fqn: str
    slot: str
    state: Any
    stored: torch.Tensor
    start: int
    index: np.ndarray = field(repr=False)

    def bits(self) -> torch.Tensor:
        """The bits of its elements; writing changes the file's content."""
        flat = self.stored.view(-1)[self.start : self.start + len(self.index)]
        return flat.view(_INTEGERS[flat.element_size()])


class Harm:
    """Harms copies of one checkpoint of a 2x2x2 run.

    Args:
        good: the checkpoint.
        stale: the same run's checkpoint of another step.
        seed: of the choices.
    """

    def __init__(self, good: Path, stale: Path, seed: int) -> None:
        self.good, self.stale, self.seed = good, stale, seed
        self.draw = random.Random(seed)

    def apply(self, kind: str, folder: Path) -> tuple[Path, Expected]:
        """Copy the checkpoint into ``folder`` and harm the copy."""
        self.copy = Path(shutil.copytree(self.good, folder / self.good.name))
        act: Callable[[], Expected] = getattr(self, f"_{kind}")
        return self.copy, act()

    def _place(self, least: int = 1, slots: tuple[str, ...] = ("weight", *SLOTS)) -> Place:
        """Some run of at least so many elements of which most are not zero."""
        while True:
            slot = self.draw.choice(slots)
            files = sorted(self.copy.glob("layer_*.pt" if slot == "weight" else "bf16_zero*.pt"))
            file = self.draw.choice(files)
            places = list(places_in(file, slot))
            place = self.draw.choice(places) if places else None
            if place is not None and len(place.index) >= least and float((place.bits() != 0).float().mean()) > 0.95:
                return place

    def _finish(self, place: Place, pattern: str, at: np.ndarray, detail: str = "") -> Expected:
        torch.save(place.state, place.file)
        chosen = sorted(tuple(int(n) for n in place.index[i]) for i in at)
        return Expected(
            {pattern},
            {place.file.name},
            {place.rank},
            (place.fqn, place.slot),
            list(chosen[0]),
            list(chosen[-1]),
            len(at),
            detail,
        )

    def _bit(self) -> Expected:
        place = self._place()
        at, bit = self.draw.randrange(len(place.index)), self.draw.randrange(place.bits().element_size() * 8)
        _flip(place, at, 1 << bit)
        return self._finish(place, "bit", np.array([at]), f"bit {bit}")

    def _element(self) -> Expected:
        place = self._place()
        at = self.draw.randrange(len(place.index))
        _flip(place, at, 0b101 << self.draw.randrange(10))
        return self._finish(place, "element", np.array([at]))

    def _run(self) -> Expected:
        place = self._place(100)
        at = self.draw.randrange(len(place.index) - 40) + np.arange(self.draw.randint(2, 7))
        for one in at:
            _flip(place, int(one), self.draw.randrange(1, 1 << 14))
        return self._finish(place, "run", at)

    def _period(self) -> Expected:
        place = self._place(100)
        step = self.draw.choice([3, 8, 16])
        at = self.draw.randrange(10) + step * np.arange(self.draw.randint(3, 5))
        for one in at:
            _flip(place, int(one), self.draw.randrange(1, 1 << 14))
        return self._finish(place, "period", at, f"every {step} elements")

    def _scattered(self) -> Expected:
        place = self._place(100)
        at = np.array([1, 5, 30, 31, 77])
        for one in at:
            _flip(place, int(one), self.draw.randrange(1, 1 << 14))
        return self._finish(place, "scattered", at)

    def _zeros(self) -> Expected:
        place = self._place(100, ("weight", "master"))
        first = self.draw.randrange(1, len(place.index) - 60)
        last = self.draw.choice([first + 40, len(place.index) - 1])
        at = first + (place.bits()[first : last + 1] != 0).nonzero().view(-1).numpy()
        place.bits()[first : last + 1] = 0
        return self._finish(place, "zeros", at, "to the end" if last == len(place.index) - 1 else "within")

    def _one_slot(self) -> Expected:
        """One tensor of one slot of one rank: another update."""
        place = self._place(64, ("exp_avg", "exp_avg_sq", "master"))
        flat = place.stored.detach()[place.start : place.start + len(place.index)]
        at = (flat != 0).nonzero().view(-1).numpy()
        flat.mul_(1.5)
        return self._finish(place, "shard", at)

    def _torn(self) -> Expected:
        """The end of a rank's file is of another step, from some element of the flat tensor on."""
        changed = np.zeros(0)
        while len(changed) < 100:  # a shard may hold rows of the embedding that no text has used
            file = self._file("bf16_zero*.pt")
            state, old = _load(file), _load(self.stale / file.name)
            flat, before = (_flat(one, "exp_avg") for one in (state, old))
            changed = (flat != before).nonzero().view(-1).numpy()
        first = self.draw.randrange(20, int(changed[-1]) - 20)
        flat[first:] = before[first:]
        torch.save(state, file)
        return Expected({"tail", "shard", "run"}, {file.name}, {_rank(file)})

    def _stale(self) -> Expected:
        """A whole file of another step; that of weights or of a rank's optimizer."""
        file = self._file("bf16_zero*.pt", _LAYERS)
        while _equal(_load(file), _load(self.stale / file.name)):  # bf16 rows of the embedding may stay as they were
            file = self._file("bf16_zero*.pt", _LAYERS)
        shutil.copyfile(self.stale / file.name, file)
        table = {"scattered"} if file.name.startswith("layer_00") else set()  # few rows of the embedding are used
        return Expected({"shard", "scalar", *table}, {file.name}, {_rank(file)})

    def _swapped_tensor_ranks(self) -> Expected:
        one = self._file("bf16_zero*_00_optim*.pt", "bf16_zero*_02_optim*.pt", "layer_0[0235]-model_00-*.pt")
        other = one.with_name(_neighbour(one.name))
        return self._exchange(one, other)

    def _swapped_replicas(self) -> Expected:
        one = self._file("bf16_zero_pp_rank_0*.pt")
        return self._exchange(one, one.with_name(one.name.replace("pp_rank_0", "pp_rank_1")))

    def _exchange(self, one: Path, other: Path) -> Expected:
        spare = one.with_suffix(".spare")
        one.rename(spare)
        other.rename(one)
        spare.rename(other)
        return Expected({"swapped", "shard", "scalar"}, {one.name, other.name}, {_rank(one), _rank(other)})

    def _dtype(self) -> Expected:
        place = self._place()
        _replace(place, place.stored.to(torch.float16))
        torch.save(place.state, place.file)
        return Expected({"dtype"}, {place.file.name}, {place.rank}, detail="float16")

    def _shape(self) -> Expected:
        place = self._place(16)
        _replace(place, place.stored[:-2].clone())
        torch.save(place.state, place.file)
        return Expected({"shape"}, {place.file.name}, {place.rank})

    def _missing(self) -> Expected:
        file = self._file("bf16_zero*.pt", "layer_*.pt", "rank_*.pt")
        rank = int(file.name[5:10]) if file.name.startswith("rank_") else _rank(file)
        file.unlink()
        return Expected({"missing"}, {file.name}, {rank})

    def _generator(self) -> Expected:
        file = self._file("rank_*.pt")
        state = _load(file)
        state["rng"]["torch"][self.draw.randrange(100)] ^= 1
        torch.save(state, file)
        rank = int(file.name[5:10])
        return Expected({"scalar"}, {file.name}, {rank}, (f"rank {rank:05d}/random generators", "scalar"))

    def _step(self) -> Expected:
        file = self._file("bf16_zero*.pt")
        state = _load(file)
        state["optimizer_state_dict"]["base_optimizer_state"]["state"][1]["step"] += 1
        torch.save(state, file)
        return Expected({"scalar"}, {file.name}, {_rank(file)}, (f"rank {_rank(file):05d}/group 1/step", "scalar"))

    def _file(self, *patterns: str) -> Path:
        return self.draw.choice(sorted(file for pattern in patterns for file in self.copy.glob(pattern)))


KINDS = [
    name[1:] for name, value in vars(Harm).items() if getattr(value, "__annotations__", {}) == {"return": "Expected"}
]


def places_in(file: Path, slot: str) -> list[Place]:
    """The runs of elements in a file, with the index of each in the whole tensor."""
    state, rank = _load(file), _rank(file)
    if slot == "weight":
        layer, tp_rank = int(file.name[6:8]), rank % 2
        found = []
        for name, tensor in state.items():
            if isinstance(tensor, torch.Tensor):
                fqn = f"{layer}.{name}"
                index = _indices(fqn, tuple(tensor.shape), tp_rank)
                found.append(Place(file, rank, fqn, slot, state, tensor, 0, index))
        return found
    found = []
    maps = [
        _load(file.with_name(re.sub(r"pp_rank_\d", f"pp_rank_{dp_rank}", file.name)))["optimizer_state_dict"]
        for dp_rank in range(2)
    ]
    shapes = _load(file.with_name(f"{file.name[20:30]}_model_states.pt"))["param_shapes"]
    mine = rank // 2 % 2
    for group, mapping in enumerate(maps[mine]["param_slice_mappings"]):
        for fqn, address in mapping.items():
            before = maps[0]["param_slice_mappings"][group].get(fqn) if mine else None
            skip = 0 if before is None else before.numel
            index = _indices(fqn, tuple(shapes[group][fqn]), rank % 2)[skip : skip + address.numel]
            found.append(Place(file, rank, fqn, slot, state, _flat(state, slot, group), address.start, index))
    return found


def _indices(fqn: str, local: tuple[int, ...], tp_rank: int) -> np.ndarray:
    """Index in the whole tensor of every element of one of two tensor ranks' shards, [n, dimensions]."""
    kept = np.stack(np.meshgrid(*(np.arange(size) for size in local), indexing="ij"), -1).reshape(-1, len(local))
    if "norm" in fqn:
        return kept
    if "linear_proj" in fqn or "linear_fc2" in fqn:
        kept[:, 1] += tp_rank * local[1]
    elif "linear_fc1" in fqn:  # [gate; up] of each rank
        half = local[0] // 2
        kept[:, 0] = np.where(kept[:, 0] < half, kept[:, 0] + tp_rank * half, kept[:, 0] + half + tp_rank * half)
    else:
        kept[:, 0] += tp_rank * local[0]
    return kept


def _rank(file: Path) -> int:
    """Global rank that wrote a file of the 2x2x2 run; layers are written by the first replica."""
    match = _NAME.fullmatch(file.name)
    assert match is not None, file
    if match[1] is not None:
        stage = int(match[2])
        return (stage // 2) * 4 + int(match[1]) * 2 + stage % 2
    return (0 if int(match[3]) <= 2 else 4) + int(match[4])


def _neighbour(name: str) -> str:
    """The file of the other tensor rank."""
    if name.startswith("layer_"):
        return name.replace("model_00", "model_01")
    return re.sub(r"mp_rank_(\d\d)", lambda match: f"mp_rank_{int(match[1]) + 1:02d}", name)


def _flat(state: Any, slot: str, group: int = 0) -> torch.Tensor:
    optimizer = state["optimizer_state_dict"]
    if slot == "master":
        return optimizer["single_partition_of_fp32_groups"][group]
    return optimizer["base_optimizer_state"]["state"][group][slot]


def _replace(place: Place, tensor: torch.Tensor) -> None:
    """Put another tensor into the file's state where the place's tensor is."""
    if place.slot == "weight":
        place.state[place.fqn.partition(".")[2]] = tensor
        return
    optimizer = place.state["optimizer_state_dict"]
    groups = optimizer["single_partition_of_fp32_groups"]
    for group in range(len(groups)):
        if place.slot == "master" and groups[group] is place.stored:
            groups[group] = tensor
        elif place.slot != "master" and _flat(place.state, place.slot, group) is place.stored:
            optimizer["base_optimizer_state"]["state"][group][place.slot] = tensor


def _flip(place: Place, at: int, mask: int) -> None:
    bits = place.bits()
    width = bits.element_size() * 8
    value = (int(bits[at]) ^ mask) & ((1 << width) - 1)
    bits[at] = value - (1 << width) if value >> (width - 1) else value


def _equal(one: Any, other: Any) -> bool:
    """Whether all tensors of two files are the same."""
    pairs = zip(flatten("", one), flatten("", other), strict=True)
    return all(torch.equal(a, b) for (_, a), (_, b) in pairs if isinstance(a, torch.Tensor))


def _load(file: Path) -> Any:
    return torch.load(file, map_location="cpu", weights_only=False)
