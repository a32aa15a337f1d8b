"""Dividing GPUs: every small case of every mode."""

from __future__ import annotations

import itertools

import pytest

from ft_core.errors import ConfigError
from ft_core.launch.gpus import divide, visible_gpus

EIGHT = [str(number) for number in range(8)]
SMALL = list(itertools.product(range(9), range(1, 9), range(1, 5)))


def test_auto_gives_neighbours() -> None:
    assert divide(EIGHT, 4, 2, "auto") == ["0,1", "2,3", "4,5", "6,7"]
    assert divide(EIGHT, 2, 1, "auto") == ["0,1,2,3", "4,5,6,7"]
    assert divide(EIGHT, 3, 2, "auto") == ["0,1", "2,3", "4,5"]
    assert divide([], 3, 2, "auto") == [None, None, None]


def test_names_are_copied_whatever_they_look_like() -> None:
    names = ["GPU-8a3f", "MIG-GPU-1/7/0", "MIG-55aa"]
    assert divide(names, 3, 1, "auto") == names
    assert divide(names, 2, 2, "share") == ["GPU-8a3f,MIG-GPU-1/7/0", "MIG-55aa,GPU-8a3f"]


def test_share_goes_round() -> None:
    assert divide(["0"], 3, 1, "share") == ["0", "0", "0"]
    assert divide(["0", "1", "2"], 4, 1, "share") == ["0", "1", "2", "0"]
    assert divide(["0", "1"], 2, 2, "share") == ["0,1", "0,1"]


def test_all_and_none_never_look_at_the_gpus() -> None:
    for visible in ([], EIGHT):
        assert divide(visible, 3, 100, "all") == [None] * 3
        assert divide(visible, 3, 100, "none") == [""] * 3


def test_auto_is_disjoint_even_and_enough_or_refused() -> None:
    for gpus, groups, nproc in SMALL:
        if 0 < gpus < groups * nproc:
            with pytest.raises(ConfigError, match=f"need {groups * nproc} GPUs, {gpus} are visible"):
                divide(EIGHT[:gpus], groups, nproc, "auto")
            continue
        values = divide(EIGHT[:gpus], groups, nproc, "auto")
        assert len(values) == groups
        if gpus:
            shares = [(value or "").split(",") for value in values]
            assert {len(share) for share in shares} == {gpus // groups}
            assert len({gpu for share in shares for gpu in share}) == groups * (gpus // groups)


def test_share_is_even_over_gpus_and_distinct_within_a_group() -> None:
    for gpus, groups, nproc in SMALL:
        if gpus < nproc:
            with pytest.raises(ConfigError, match=f"needs as many different GPUs, {gpus} are visible"):
                divide(EIGHT[:gpus], groups, nproc, "share")
            continue
        shares = [(value or "").split(",") for value in divide(EIGHT[:gpus], groups, nproc, "share")]
        assert [len(set(share)) for share in shares] == [nproc] * groups
        load = [sum(share.count(gpu) for share in shares) for gpu in EIGHT[:gpus]]
        assert max(load) - min(load) <= 1


@pytest.mark.parametrize(
    ("visible", "groups", "nproc", "mode", "says"),
    [
        (["0", "1"], 4, 1, "auto", "4 replicas of 1 worker need 4 GPUs, 2 are visible; use --replicas 2, --gpus share"),
        (["0", "1"], 1, 3, "auto", "use --nproc-per-replica 2 or fewer, --gpus share"),
        (["0"], 2, 1, "auto", "or --gpus none to train without"),
        ([], 2, 1, "share", "0 are visible; lower --nproc-per-replica, or use --gpus none"),
        (["0"], 1, 1, "shared", r"--gpus 'shared': unknown; did you mean share\?"),
        (["0"], 0, 1, "auto", "0 replicas of 1 workers each"),
    ],
)
def test_what_is_refused(visible: list[str], groups: int, nproc: int, mode: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        divide(visible, groups, nproc, mode)


UUID = "GPU-8a3f0c1e-52b7-11ee-a0b1-0242ac120002"
OTHER = "GPU-9b000000-52b7-11ee-a0b1-0242ac120002"
SLICE = "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("", []),
        (" ", []),
        ("0", ["0"]),
        ("4, 5 ,6,7", ["4", "5", "6", "7"]),
        ("0,1,", ["0", "1"]),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,1,-1,2", ["0", "1"]),
        (f"{UUID},{OTHER}", [UUID, OTHER]),
        ("GPU-8a3f, GPU-9b", ["GPU-8a3f", "GPU-9b"]),
        ("GPU-8A3F0C1E", ["GPU-8A3F0C1E"]),
        (f"MIG-{UUID}/1/0,MIG-{UUID}/2/0", [f"MIG-{UUID}/1/0", f"MIG-{UUID}/2/0"]),
        (f"{SLICE},MIG-11111111-42e4-5de3-91c7-45d71c87eb3f", [SLICE, "MIG-11111111-42e4-5de3-91c7-45d71c87eb3f"]),
    ],
)
def test_what_is_visible_is_read_as_cuda_reads_it(text: str, entries: list[str]) -> None:
    assert visible_gpus(text) == entries


def test_slices_and_uuids_are_divided_as_they_are_named() -> None:
    slices = [f"MIG-{UUID}/{instance}/0" for instance in range(1, 5)]
    assert divide(visible_gpus(",".join(slices)), 4, 1, "auto") == slices
    assert divide(visible_gpus(f"{UUID}, {OTHER}"), 1, 2, "auto") == [f"{UUID},{OTHER}"]
    assert divide(visible_gpus("GPU-8a3f,GPU-9b"), 4, 1, "share") == ["GPU-8a3f", "GPU-9b"] * 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0,1,0", r"CUDA_VISIBLE_DEVICES=0,1,0: entry 3: 0 is named twice; name each GPU once"),
        ("1,01", r"entry 2: 01 may be the same GPU as '1'"),
        (f"{UUID},GPU-8a3f", rf"entry 2: GPU-8a3f may be the same GPU as '{UUID}'"),
        (f"GPU-8A,{UUID}", "may be the same GPU as 'GPU-8A'"),
        (f"{SLICE},{SLICE}", "is named twice"),
        ("0,,1", "entry 2 is empty: take the comma out"),
        (",0", "entry 1 is empty"),
        ("0,cuda:1", r"entry 2, 'cuda:1', names no GPU: it must be an index \(0\), a GPU's UUID or its beginning"),
        ("0 1", "entry 1, '0 1', names no GPU"),
        ("0,-2", "entry 2, '-2', names no GPU"),
        ("0.5", "names no GPU"),
        ("GPU-", "entry 1, 'GPU-', names no GPU"),
        ("GPU-xyz", "names no GPU"),
        (f"MIG-{UUID}/1", r"names no GPU: .* or a MIG slice's name \(MIG-\.\.\., MIG-GPU-\.\.\./1/0\)"),
        (f"{UUID}/1/0", "names no GPU"),
        ("1:0", "names no GPU"),
        ("\u0661", "names no GPU"),
        (f"0,{UUID}", f"entry 2, '{UUID}', is of another kind than '0': name all GPUs alike"),
        (f"{UUID},{SLICE}", "is of another kind than"),
    ],
)
def test_an_entry_at_which_cuda_would_stop_is_refused_by_its_name(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        visible_gpus(text)
