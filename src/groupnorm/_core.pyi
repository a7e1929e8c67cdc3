from enum import Enum
from typing import Any

from groupnorm.arguments import Array

Strides = tuple[int, int]

class DType(Enum):
    float32 = 0
    float64 = 1
    float16 = 2
    bfloat16 = 3

class Activation(Enum):
    none = 0
    relu = 1
    swish = 2
    gelu = 3
    gelu_tanh = 4

class Layout(Enum):
    channels_first = 0
    channels_last = 1

class Strategy(Enum):
    one_by_one = 0
    samples_in_lanes = 1
    whole_groups = 2
    whole_samples = 3
    pieces = 4

class Problem:
    def __init__(
        self,
        dtype: DType,
        layout: Layout,
        samples: int,
        channels: int,
        spatial: int,
        group_sizes: list[int],
        activation: Activation,
        beta: float,
        parameter_dtypes: list[DType],
        /,
    ) -> None: ...
    def forward(
        self,
        x: Array,
        x_strides: Strides,
        residual: Array | None,
        residual_strides: Strides,
        sum: Array | None,
        sum_strides: Strides,
        y: Array,
        y_strides: Strides,
        eps: float,
        weight: Array | None,
        bias: Array | None,
        scale: Array | None,
        shift: Array | None,
        mean: Array | None,
        rstd: Array | None,
        /,
    ) -> None: ...
    def moments(self, x: Array, x_strides: Strides, mean: Array, m2: Array, /) -> None: ...
    def normalize(
        self,
        x: Array,
        x_strides: Strides,
        mean: Array,
        rstd: Array,
        weight: Array | None,
        bias: Array | None,
        scale: Array | None,
        shift: Array | None,
        y: Array,
        y_strides: Strides,
        /,
    ) -> None: ...
    def backward(
        self,
        dy: Array,
        dy_strides: Strides,
        x: Array,
        x_strides: Strides,
        mean: Array,
        rstd: Array,
        weight: Array | None,
        bias: Array | None,
        scale: Array | None,
        shift: Array | None,
        dx: Array | None,
        dx_strides: Strides,
        dweight: Array | None,
        dbias: Array | None,
        dscale: Array | None,
        dshift: Array | None,
        /,
    ) -> None: ...
    def reduce(
        self,
        dy: Array,
        dy_strides: Strides,
        x: Array,
        x_strides: Strides,
        mean: Array,
        rstd: Array,
        weight: Array | None,
        bias: Array | None,
        scale: Array | None,
        shift: Array | None,
        a: Array,
        b: Array | None,
        /,
    ) -> None: ...
    def apply(
        self,
        dy: Array,
        dy_strides: Strides,
        x: Array,
        x_strides: Strides,
        mean: Array,
        rstd: Array,
        weight: Array | None,
        bias: Array | None,
        scale: Array | None,
        shift: Array | None,
        a: Array,
        b: Array,
        dx: Array,
        dx_strides: Strides,
        /,
    ) -> None: ...
    def plan(self, backward: bool) -> tuple[Strategy, int]: ...

compiler: str
build_type: str

def forward_call(
    x: Any,
    num_groups: Any,
    weight: Any,
    bias: Any,
    eps: Any,
    activation: Any,
    scale: Any,
    shift: Any,
    residual: Any,
    channel_axis: Any,
    out: Any,
    return_stats: Any,
    /,
) -> Any: ...
def learn_forward(
    arguments: tuple[Any, ...],
    problem: Problem,
    x: Strides,
    residual: Strides,
    out: Strides,
    fresh: Strides,
    memory_shape: list[int],
    axes: list[int],
    /,
) -> None: ...
def backward_call(
    dy: Any,
    x: Any,
    mean: Any,
    rstd: Any,
    num_groups: Any,
    weight: Any,
    bias: Any,
    activation: Any,
    scale: Any,
    shift: Any,
    channel_axis: Any,
    output_mask: Any,
    /,
) -> tuple[Any, ...] | None: ...
def learn_backward(
    arguments: tuple[Any, ...],
    problem: Problem,
    dy: Strides,
    x: Strides,
    fresh: Strides,
    memory_shape: list[int],
    axes: list[int],
    /,
) -> None: ...
def known_calls() -> int: ...
def forget_calls() -> None: ...
def empty(shape: list[int], dtype: Any, /) -> Array: ...
def poison_results(enable: bool, /) -> None: ...
def result_cache_limit() -> int: ...
def set_result_cache_limit(limit: int, /) -> None: ...
def result_cache_held() -> int: ...
def empty_result_cache() -> None: ...
def shared_cache_bytes() -> int: ...
def stream_limit() -> int: ...
def set_stream_limit(bytes: int, /) -> None: ...
def scratch_held() -> int: ...
def poison_scratch(byte: int, /) -> None: ...
def define_torch_operators(schemas: list[tuple[str, str]]) -> str: ...
def override_aten(enable: bool, asks_for_the_type: bool) -> None: ...
def enable_torch_direct(
    types: tuple[type, type], empty_like: Any, is_neg: Any, watchers: tuple[tuple[Any, ...], ...], /
) -> str: ...
def direct_forward(
    x: Any,
    num_groups: int,
    weight: Any,
    bias: Any,
    eps: Any,
    activation: int,
    with_statistics: bool,
    /,
) -> Any: ...
def direct_backward(
    dy: Any,
    x: Any,
    statistics: bytes,
    num_groups: int,
    weight: Any,
    bias: Any,
    activation: int,
    wanted: int,
    /,
) -> tuple[Any, Any, Any] | None: ...
def adopt_array(exporter: Any, /) -> tuple[Array, bool]: ...
def copy(destination: Array, source: Array, /) -> None: ...
def get_num_threads() -> int: ...
def set_num_threads(count: int, /) -> None: ...
def threading_runtime() -> str: ...
def isa_selected() -> str: ...
def isa_force(name: str | None) -> None: ...
def isa_list() -> list[tuple[str, str | None, int]]: ...
