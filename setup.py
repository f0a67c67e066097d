"""Builds the engine's compiled loops. They are optional: where they cannot be built, the engine uses torch."""

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError


class Build(build_ext):
    """With threads where the compiler has OpenMP, without them where it has not."""

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
            "revisit._kernel",
            ["src/revisit/kernel.c"],
            extra_compile_args=["-O3", "-Wno-psabi", "-fopenmp"],
            extra_link_args=["-fopenmp"],
            optional=True,
        )
    ],
    cmdclass={"build_ext": Build},
)
