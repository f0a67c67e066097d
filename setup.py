"""Build the compiled step. It is optional: without it, torch is used."""

import hashlib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

SOURCE = "src/revisit/step/compiled/kernel.c"


class Build(build_ext):
    """Build a plain shared library, which ctypes loads; with threads if the compiler supports OpenMP."""

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []  # not a Python module

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except CompileError:
            ext.extra_compile_args.remove("-fopenmp")
            ext.extra_link_args.remove("-fopenmp")
            super().build_extension(ext)


class Wheel(bdist_wheel):
    """One wheel per platform for every version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "revisit.step.compiled._kernel",
            [SOURCE],
            # kernel.py uses the library only if it was built from the source that lies beside it.
            define_macros=[("SOURCE", f'"{hashlib.sha256(Path(SOURCE).read_bytes()).hexdigest()}"')],
            extra_compile_args=["-O3", "-Wno-psabi", "-fopenmp"],
            extra_link_args=["-fopenmp"],
            optional=True,
        )
    ],
    cmdclass={"build_ext": Build, "bdist_wheel": Wheel},
)
