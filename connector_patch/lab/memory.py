"""KV-cache memory by address, wherever vLLM has it: the host's, or a GPU's."""

from __future__ import annotations

import ctypes
from typing import Any

from .platform import on_gpu


class _Device:
    """So many bytes of the GPU's memory, in the form that torch takes without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _device(address: int, size: int) -> Any:
    import torch

    return torch.as_tensor(_Device(address, size), device="cuda")


def read(address: int, size: int) -> bytes:
    if on_gpu():
        return bytes(_device(address, size).cpu().numpy())
    return ctypes.string_at(address, size)


def write(address: int, data: bytes) -> None:
    if on_gpu():
        import torch

        _device(address, len(data)).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        torch.cuda.synchronize()
    else:
        ctypes.memmove(address, data, len(data))


def fill(address: int, byte: int, size: int) -> None:
    """As C's memset: done when it returns."""
    if on_gpu():
        import torch

        _device(address, size).fill_(byte)
        torch.cuda.synchronize()
    else:
        ctypes.memset(address, byte, size)
