"""What compiled functions take from Numba, and where they differ from its own.

Numba's start and its compiler are lightened in five ways, and no result differs by a bit:

- Stored code is loaded before Numba has imported its implementations of numpy, and SciPy: .2 s in each process.
- A function that compiled functions call has no entry from Python, and no file of its own: the code of its callers
  contains it. It is compiled once, not again for each constant that it is called with. Both together halve the time
  of the first compilation.
- It is also optimized and turned into machine code only there. Numba does both for each function by itself, and then
  again in each of its callers: a sixth of the time that was left.
- Code is optimized once, as a whole. Numba optimizes each function before, and twice for references to arrays, and runs
  passes for closures and array expressions, which no function here has. Nothing counts references to arrays, because
  no function makes one. The type of an operator is found once for each form of its operands. Python's garbage
  collector waits meanwhile. Together this is a quarter of the time.
- Stored code is of use only as long as the function itself, the compiled functions that it calls and the constants
  that they read are the same. Numba looks at the file of the function, so that a change in the file of a called
  function had no effect.

All names of Numba are in this module. Threads that import Numba at the same time see parts of it half-made, because
its modules import each other in circles. Python lets one thread at a time execute a module, so that all others wait
here until Numba is complete.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, cached_property
from typing import Any, Final, cast

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from llvmlite.binding import get_host_cpu_features  # type: ignore[import-untyped]
from numba import version_info
from numba.core import types
from numba.core.caching import FunctionCache, NullCache
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, DefaultPassBuilder
from numba.core.event import Event, Listener, install_listener
from numba.core.registry import CPUDispatcher
from numba.core.runtime.nrt import rtsys
from numba.core.typed_passes import InlineOverloads, NopythonRewrites
from numba.core.untyped_passes import InlineClosureLikes
from numba.extending import intrinsic

__all__ = [
    "CompiledFunction",
    "Event",
    "Listener",
    "crc32c_instruction",
    "has_crc32c_instruction",
    "install_listener",
    "intrinsic",
    "types",
]

# Of these versions it is known that stored code needs nothing but the runtime, and how called functions are compiled.
# With others, Numba imports all its parts before it loads code, as it does by itself: a name that is missing then would
# end the process. And it compiles called functions in its own way.
LOADED_AT_ONCE: Final = ((0, 68),)

# Compiled functions make no arrays, so nothing counts references (`_nrt`).
_OPTIONS: Final = {"nopython": True, "nogil": True, "boundscheck": None, "no_cfunc_wrapper": True, "_nrt": False}
_LEFT_OUT: Final = (InlineClosureLikes, InlineOverloads, NopythonRewrites)
"""The passes of Numba for closures, functions of other packages, and array expressions."""


class CompiledFunction(CPUDispatcher):
    """A function that is compiled when it is first called; its code is stored if a directory can be written."""

    _cache: Any

    def __init__(self, function: Callable[..., Any], *, separate: bool = False) -> None:
        """``separate``: as for :func:`~streamiter.values.helpers.compiled.compiled_for_separate`."""
        self.separate = separate
        self._own_options = _OPTIONS | ({"error_model": "numpy"} if separate else {})
        compiler = _WholeCompiler if version_info.short in LOADED_AT_ONCE else Compiler
        super().__init__(function, targetoptions=self._own_options, pipeline_class=compiler)

    def compile(self, signature: Any) -> Any:
        """Load or compile the function for a form of its arguments."""
        # A function that only compiled functions call needs no directory, which is tried by writing a file.
        if isinstance(self._cache, NullCache):
            # No directory can be written, or the function has no file, as in an interactive session.
            with suppress(RuntimeError):
                self._cache = _StoredCode(self.py_func)
        # Collections of garbage take a twentieth of the time, and free hardly anything.
        is_enabled = gc.isenabled()
        gc.disable()
        try:
            return super().compile(signature)
        finally:
            if is_enabled:
                gc.enable()

    def add_overload(self, result: Any) -> None:
        """Add compiled or loaded code, and give the called functions in it their environments, as loading does."""
        super().add_overload(result)
        for environment in result._find_referenced_environments():
            result.library.codegen.set_env(environment.env_name, environment)

    def _compilation_chain_init_hook(self) -> None:
        """Leave out the search for extensions of Numba in all installed packages; no function here needs any."""

    @cached_property
    def _called(self) -> _CalledFunction:
        called = _SeparateCompiler if self.separate else _CalledCompiler
        compiler = called if version_info.short in LOADED_AT_ONCE else Compiler
        options = self._own_options | {"no_cpython_wrapper": True}
        return _CalledFunction(self.py_func, targetoptions=options, pipeline_class=compiler)

    @property
    def _numba_type_(self) -> Any:
        """The type that compiled functions see."""
        return types.Dispatcher(self._called)


class _CalledFunction(CPUDispatcher):
    """A compiled function as other compiled functions call it."""

    def get_call_template(self, arguments: Any, keywords: Any) -> Any:
        return super().get_call_template(tuple(map(types.unliteral, arguments)), keywords)


class _WholeCode(JITCodeLibrary):
    """The code of a function and all functions that it calls, optimized once, to compute several numbers at once."""

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        passes, builder = self._codegen._module_pass_manager(opt=2, slp_vectorize=True)
        passes.run(self._final_module, builder)


class _CalledCode(_WholeCode):
    """The code of a called function, as it is linked into the code of its callers. It has no address."""

    @property
    def codegen(self) -> Any:
        """The object that sets environments, which are known only where the code is."""
        return self

    def set_env(self, name: str, environment: Any) -> None:
        """Do nothing: see :meth:`CompiledFunction.add_overload`."""

    def get_pointer_to_function(self, name: str) -> int:
        """Return that the function has no address."""
        self._ensure_finalized()
        return 0

    def _optimize_final_module(self) -> None:
        """Do nothing, and make no machine code."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


class _Typing:
    """Numba's types of results, of which those of operators and functions are found once for each form of arguments."""

    def __init__(self, typing: Any) -> None:
        self._typing = typing
        self._found: dict[tuple[Any, tuple[Any, ...]], Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._typing, name)

    def resolve_function_type(self, function: Any, arguments: Any, keywords: Any) -> Any:
        """Return the form in which a function is called."""
        if keywords or not isinstance(function, types.Function):
            return self._typing.resolve_function_type(function, arguments, keywords)
        key = function, tuple(arguments)
        if key not in self._found:
            self._found[key] = self._typing.resolve_function_type(function, arguments, keywords)
        return self._found[key]


@cache
def _remembering(typing: Any) -> _Typing:
    return _Typing(typing)


class _WholeCompiler(Compiler):
    """Compiles a function and all functions that it calls."""

    library_class: type[_WholeCode] = _WholeCode

    def __init__(self, typing: Any, target: Any, library: Any, *others: Any) -> None:
        if library is None:
            library = self.library_class(target.codegen(), "compiled")
            library.enable_object_caching()
        super().__init__(_remembering(typing), target, library, *others)

    def define_pipelines(self) -> list[Any]:
        """Return the passes that the functions need."""
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.passes = [each for each in passes.passes if each[0] not in _LEFT_OUT]
        passes.finalize()
        return [passes]


class _CalledCompiler(_WholeCompiler):
    """Compiles a function for its callers only."""

    library_class = _CalledCode


class _SeparateCompiler(_CalledCompiler):
    """Compiles a function for callers whose arguments point to separate memory."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.state.flags.noalias = True


class _StoredCode(FunctionCache):
    """The stored code of a function, for each form of its arguments."""

    def load_overload(self, signature: Any, target: Any) -> Any:
        """Return the code for a form of the arguments; None if it has to be compiled."""
        try:
            if version_info.short not in LOADED_AT_ONCE:
                return super().load_overload(signature, target)
            rtsys.initialize(target)
            with self._guard_against_spurious_io_errors():
                return self._load_overload(signature, target)
        except (ImportError, AttributeError, TypeError):
            # The list of what is stored names modules, and classes with fields, of the version that has written it.
            self.flush()
            return None

    def _index_key(self, signature: Any, codegen: Any) -> Any:
        # Types of named tuples are equal if only the names or the order of their fields differ.
        arguments = getattr(signature, "args", signature)
        fields = tuple([each.fields for each in arguments if isinstance(each, (types.NamedTuple, types.NamedUniTuple))])
        return *super()._index_key(signature, codegen), self._digest, fields

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256()
        for part in _parts(self._py_func, set()):
            digest.update(repr(part).encode())
        return digest.hexdigest()


def _parts(function: Callable[..., Any], seen: set[Callable[..., Any]]) -> Iterator[object]:
    """Yield what the code of a function depends on, in an order that is always the same."""
    seen.add(function)
    code = function.__code__
    yield code.co_code, code.co_consts, code.co_names
    for name in code.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, CompiledFunction):
            yield value.separate
            if value.py_func not in seen:
                yield from _parts(value.py_func, seen)
        elif isinstance(value, np.ndarray):
            yield value.dtype, value.shape, value.tobytes()
        elif isinstance(value, type):
            yield name, getattr(value, "_fields", ())
        elif isinstance(value, (int, float, str, bytes, np.generic, tuple)):
            yield name, value


@cache
def has_crc32c_instruction() -> bool:
    """Whether the processor has the instruction of :func:`crc32c_instruction`, as those of x86 since 2008 have."""
    with suppress(RuntimeError):  # llvmlite does not know the features of each processor.
        return bool(get_host_cpu_features().get("sse4.2"))
    return False


def crc32c_instruction(bits: int) -> Callable[[int, Any, int], int]:
    """Return a function for compiled code that adds 8 or 64 bits, at an index of a pointer to bytes, to a checksum.

    The checksum is CRC-32C, before its bits are inverted. The function takes one instruction of the processor.
    """

    def add_bits(_context: Any, checksum: Any, data: Any, at: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            added, whole = ir.IntType(bits), ir.IntType(64)
            state = whole if bits == 64 else ir.IntType(32)
            function = ir.FunctionType(state, [state, added])
            instruction = builder.module.declare_intrinsic(f"llvm.x86.sse42.crc32.{state.width}.{bits}", (), function)
            place = builder.bitcast(builder.gep(arguments[1], [arguments[2]]), added.as_pointer())
            value = builder.load(place, align=1)
            before = arguments[0] if state is whole else builder.trunc(arguments[0], state)
            after = builder.call(instruction, [before, value])
            return after if state is whole else builder.zext(after, whole)

        return types.int64(types.int64, data, types.int64), generate

    return cast(Callable[[int, Any, int], int], intrinsic(add_bits))
