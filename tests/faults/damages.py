"""Ways to damage a file, and what a command makes of the damaged file."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

from tests.faults.suite import Suite
from tests.hostile import Command, refused_or_done


def flip(content: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(content)
    damaged[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def cut(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content))]


def zeros(content: bytes, rng: random.Random) -> bytes:
    """Replace some bytes by zeros, as a file system does with a block that it lost."""
    first = rng.randrange(len(content))
    n = min(rng.choice([1, 16, 512, 4096]), len(content) - first)
    return content[:first] + bytes(n) + content[first + n :]


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {"flip": flip, "cut": cut, "zeros": zeros}


def damage(file: Path, how: str, rng: random.Random) -> None:
    content = file.read_bytes()
    damaged = content
    while damaged == content:
        damaged = DAMAGES[how](content, rng)
    file.write_bytes(damaged)


def record_use(suite: Suite, detail: str, is_same: Callable[[], bool], command: Command, *arguments: object) -> None:
    """Run a command on damaged input, and count what it does; ``is_same`` compares its result with the undamaged one."""
    try:
        line = refused_or_done(command, *arguments)
    except AssertionError as error:
        suite.record("wrong", f"{detail}: {str(error)[-300:]}")
        return
    if line is not None:
        suite.record("refused", line)
    else:
        suite.record("harmless" if is_same() else "silent", detail)


class Payload:
    """An object whose unpickling writes the canary's file."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {os.environ.get('CANARY', '/tmp/unpickled')}",)
