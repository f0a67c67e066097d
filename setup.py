"""Build the compiled step. It is optional: without it, torch is used."""

import hashlib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

SOURCE = "src/revisit/step/compiled/kernel.c"


class Build(build_ext):
    """Builds with threads if the compiler supports OpenMP."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except CompileError:
            ext.extra_compile_args.remove("-fopenmp")
            ext.extra_link_args.remove("-fopenmp")
            super().build_extension(ext)


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
    cmdclass={"build_ext": Build},
)
