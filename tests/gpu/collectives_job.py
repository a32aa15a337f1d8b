"""One of two ranks that run every collective over the group named by argv: `RANK KIND ADDRESS GLOO-ADDRESS`.

The same collective goes over Gloo, from the same tensors in CPU memory. Prints `same NAME` or `differs NAME ...` for
each, then `over ERROR`, ERROR being the group's own.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ReduceOp

from ft_core import process_group
from ft_core.process_group import ProcessGroup, ProcessGroupGloo
from tests.gpu.pair import device

TIMEOUT = timedelta(seconds=60)
Collective = Callable[[ProcessGroup, torch.device, int], list[torch.Tensor]]
COLLECTIVES: dict[str, Collective] = {}


def collective(do: Collective) -> Collective:
    COLLECTIVES[do.__name__] = do
    return do


def own(place: torch.device, rank: int, *shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).add_(10.0 * rank).view(shape).to(place)


@collective
def allreduce(group: ProcessGroup, place: torch.device, rank: int) -> list[torch.Tensor]:
    found = [own(place, rank, 3, 5), own(place, rank, 1_000_000)]
    for tensor in found:
        group.allreduce([tensor], ReduceOp.SUM).wait()
    return found


@collective
def allreduce_max(group: ProcessGroup, place: torch.device, rank: int) -> list[torch.Tensor]:
    tensor = own(place, rank, 7)
    group.allreduce([tensor], ReduceOp.MAX).wait()
    return [tensor]


@collective
def allreduce_bfloat16(group: ProcessGroup, place: torch.device, rank: int) -> list[torch.Tensor]:
    tensor = own(place, rank, 64).bfloat16()
    group.allreduce([tensor]).wait()
    return [tensor.float()]


@collective
def allreduce_coalesced(group: ProcessGroup, place: torch.device, rank: int) -> list[torch.Tensor]:
    tensors = [own(place, rank, 2), own(place, rank, 5)]
    group.allreduce_coalesced(tensors).wait()
    return tensors


@collective
def allgather(group: ProcessGroup, place: torch.device, rank: int) -> list[torch.Tensor]:
    outputs = [torch.zeros(4, device=place) for _ in range(2)]
    group.allgather([outputs], [own(place, rank, 4)]).wait()
    return outputs


@collective
def allgather_into_tensor(group: ProcessGroup, place: torch.device, rank: int) -> list[torch.Tensor]:
    output = torch.zeros(8, device=place)
    group._allgather_base(output, own(place, rank, 4)).wait()
    return [output]


@collective
def broadcast(group: ProcessGroup, place: torch.device, rank: int) -> list[torch.Tensor]:
    tensor = own(place, rank, 4)
    group.broadcast_one(tensor, root=1).wait()
    return [tensor]


@collective
def reduce_scatter(group: ProcessGroup, place: torch.device, rank: int) -> list[torch.Tensor]:
    output = torch.zeros(3, device=place)
    group.reduce_scatter([output], [[own(place, rank, 3), own(place, rank + 5, 3)]]).wait()
    return [output]


@collective
def reduce_scatter_tensor(group: ProcessGroup, place: torch.device, rank: int) -> list[torch.Tensor]:
    output = torch.zeros(3, device=place)
    group._reduce_scatter_base(output, own(place, rank, 6)).wait()
    return [output]


@collective
def alltoall_base(group: ProcessGroup, place: torch.device, rank: int) -> list[torch.Tensor]:
    output = torch.zeros(4, device=place)
    group.alltoall_base(output, own(place, rank, 4), [2, 2], [2, 2]).wait()
    return [output]


@collective
def send_and_receive(group: ProcessGroup, place: torch.device, rank: int) -> list[torch.Tensor]:
    tensor = own(place, rank, 4)
    if rank == 0:
        group.send([tensor], 1, 3).wait()
    else:
        group.recv([tensor], 0, 3).wait()
    return [tensor]


@collective
def barrier(group: ProcessGroup, place: torch.device, rank: int) -> list[torch.Tensor]:
    del place, rank
    group.barrier().wait()
    return []


def groups(kind: str, rank: int, address: str, beside: str) -> list[ProcessGroup]:
    made: list[Any] = [getattr(process_group, kind)(TIMEOUT), ProcessGroupGloo(TIMEOUT, hostname="127.0.0.1")]
    for group, where in zip(made, (address, beside), strict=True):
        group.configure(where, f"replica{rank}", rank, 2)
    return made


def main(rank: int, kind: str, address: str, beside: str) -> None:
    place = device()
    if place.type == "cuda":
        torch.cuda.set_device(place)
    tried, gloo = groups(kind, rank, address, beside)
    for name, do in COLLECTIVES.items():
        try:
            expected = do(gloo, torch.device("cpu"), rank)
            found = [tensor.cpu() for tensor in do(tried, place, rank)]
        except Exception:  # noqa: BLE001 - the test reads what is printed
            print("differs", name, traceback.format_exc(), flush=True)
            break
        same = all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        print(*(["same", name] if same else ["differs", name, found, expected]), flush=True)
    print("over", tried.errored(), flush=True)
    sys.stdin.readline()  # who ends closes connections that the other may still use
    tried.shutdown()
    gloo.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:5])
