"""How are the native CPU kernels built? Everything else about the package is in pyproject.toml.

The library is optional: where it cannot be built the package installs without it.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = Path("ridgeline/kernels/cpu")
NUMBERED = FOLDER / "native.py"  # says which number of its interface Python expects
COMMON = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread"]
COMMON += ["-fno-math-errno", "-fno-trapping-math", "-g0", "-Wno-maybe-uninitialized"]
# GCC 13 makes no fused products in some loops, and in others with the same lines it does; then a
# token's bits would depend on how many are computed beside it. Clang ignores it.
COMMON += ["--param=avoid-fma-max-bits=0"]
AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"]
AVX512 += ["-mprefer-vector-width=512"]
BF16 = [*AVX512, "-mavx512bf16"]
AMX = [*BF16, "-mamx-tile", "-mamx-int8", "-mamx-bf16"]
VARIANTS = {"avx2": AVX2, "avx512": AVX512, "bf16": BF16, "amx": AMX}


def flags(source: str) -> list[str]:
    """Of one file: the end of its name says which instructions it may use."""
    variant = Path(source).stem.rpartition("_")[2]
    return [*COMMON, f"-DRL_ABI={abi()}", *VARIANTS.get(variant, [])]


def abi() -> int:
    """The number that the library tells Python."""
    text = (Path(__file__).parent / NUMBERED).read_text(encoding="utf-8")
    found = re.search(r"^ABI = (\d+)", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"{NUMBERED} has no line ABI = NUMBER")
    return int(found[1])


class BuildNative(build_ext):
    """A plain shared library: it holds no Python, so its name says nothing about one."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []

    def build_extension(self, ext: Extension) -> None:
        def compiled(source: str) -> list[str]:
            return list(
                self.compiler.compile(
                    [source],
                    output_dir=self.build_temp,
                    extra_postargs=flags(source),
                    depends=ext.depends,
                )
            )

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            objects = [name for names in pool.map(compiled, ext.sources) for name in names]
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(ext.name),
            extra_postargs=["-pthread", "-s"],
            build_temp=self.build_temp,
            target_lang="c++",
        )


class Wheel(bdist_wheel):
    """With the library a wheel is bound to the processor, not to a version of Python; without it,
    to neither."""

    def get_tag(self) -> tuple[str, str, str]:
        has_library = any(Path(self.bdist_dir).rglob("native_cpu.so"))
        return "py3", "none", super().get_tag()[2] if has_library else "any"


def native() -> list[Extension]:
    """The library where it can be of use: Linux on x86-64."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return []
    return [
        Extension(
            "ridgeline.kernels.cpu.native_cpu",
            sources=sorted(str(path) for path in FOLDER.glob("*.cpp")),
            depends=[*sorted(map(str, FOLDER.glob("*.h"))), str(NUMBERED), "setup.py"],
            language="c++",
            optional=True,
        )
    ]


if __name__ == "__main__":
    setup(ext_modules=native(), cmdclass={"build_ext": BuildNative, "bdist_wheel": Wheel})
