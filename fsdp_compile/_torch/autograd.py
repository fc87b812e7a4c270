"""Private names of torch's autograd."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from fsdp_compile._torch.tensors import plain_torch_functions

_GRAD: Any = torch.Tensor.grad  # a descriptor: what `.grad` is, whatever a subclass says


class HookOfPlain:
    """Base of gradient hooks that a plain parameter does not pass on to the sharded one."""


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes of a tensor: its gradient hooks in a dict, or `None`."""


def share_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """Gives `new` the gradient hooks that users registered on `old`; what is registered or removed later, both have."""
    for kind in _HOOKS:
        hooks = getattr(old, kind, None)
        if hooks is None:
            continue
        for key in [key for key, hook in hooks.items() if isinstance(hook, HookOfPlain)]:
            del hooks[key]
        setattr(new, kind, hooks)  # the dict itself, which the handles that users have refer to


def move_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """Gives `new` the gradient hooks that users registered on `old`, which has none then."""
    share_hooks(old, new)
    for kind in _HOOKS:
        if getattr(old, kind, None) is not None:
            setattr(old, kind, OrderedDict())  # torch goes on calling those of the last dict after `None`


def backward_in_progress() -> int:
    """The number of the backward pass that this thread is running; -1 outside of any."""
    return torch._C._current_graph_task_id()


def profiler_runs() -> bool:
    """Whether torch's profiler records what this thread does."""
    return torch.autograd._profiler_enabled()  # type: ignore[no-any-return, attr-defined, unused-ignore]


def below_autograd() -> AbstractContextManager[None]:
    """A context in which operators go straight to their device's kernels."""
    return torch._C._AutoDispatchBelowAutograd()  # type: ignore[no-any-return, unused-ignore]


@contextmanager
def outside_of_transforms() -> Iterator[None]:
    """A context that is in no `torch.func` transform and in no `torch.inference_mode()`, whatever is around it."""
    grad = torch.is_grad_enabled()
    with temporarily_clear_interpreter_stack(), torch.inference_mode(mode=False), torch.set_grad_enabled(grad):
        yield


def leave_unused_undefined(inputs: Iterable[object], outputs: Iterable[object]) -> None:
    """Makes the backward of a graph that AOTAutograd compiled get `None` instead of zeros for outputs without gradient.

    Args:
        inputs: Of the graph.
        outputs: Of the same call.
    """
    others = {value.grad_fn for value in inputs if isinstance(value, torch.Tensor)}
    for value in outputs:
        node = value.grad_fn if isinstance(value, torch.Tensor) else None
        if node is None or node in others:  # an input that is returned
            continue
        if not _is_compiled(node) and node.next_functions:
            node = node.next_functions[0][0]  # a view, of what the graph has computed or of an input
        if node is not None and _is_compiled(node) and node not in others:
            node.set_materialize_grads(False)  # type: ignore[attr-defined]
            return


def _is_compiled(node: torch.autograd.graph.Node) -> bool:
    return type(node).__name__ == "CompiledFunctionBackward"


def is_accumulated_in_this_backward(leaf: torch.Tensor) -> bool:
    """Whether the backward pass that this thread is running puts a gradient into `leaf.grad`."""
    if not leaf.requires_grad or not is_saved_by_autograd(leaf):  # the cheap questions: most leaves are in no graph
        return False
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    return torch._C._will_engine_execute_node(node)


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether users registered hooks on a parameter's gradient."""
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def waits_for_other_gradients(hook: Callable[..., Any]) -> bool:
    """Whether a gradient hook is a part of `register_multi_grad_hook(mode="all")`."""
    # It counts the leaves that autograd accumulates into, which sharded parameters are not.
    made_in = "register_multi_grad_hook.<locals>.get_inner_hook."
    return getattr(hook, "__qualname__", "").startswith(made_in) and hook.__module__ == "torch.autograd.graph"


RunBackward = Callable[[Sequence[Any]], tuple[torch.Tensor | None, ...]]
"""Runs a backward for other inputs, of which some may get no gradient."""


outer_backwards: set[int] = set()
"""Backward passes that wait for the end of another one, which a part of them has called."""
_running_backwards: set[object] = set()


def any_backward_runs() -> bool:
    """Whether a thread of this process runs a backward."""
    return bool(_running_backwards)


def is_called_by_another() -> bool:
    """At the end of a backward: whether it is a part of another one, which goes on."""
    # Nodes of this backward are done: a node that still runs is the one that has called it.
    return torch._C._current_autograd_node() is not None


def follow_ends_of_backwards(ended: Callable[[bool], None]) -> None:
    """Calls `ended` after each backward of the process, with whether it failed; others may still run around it."""
    # What is queued for its end is not called if it fails.
    autograd: Any = torch.autograd
    run = autograd._engine_run_backward

    @functools.wraps(run)
    def followed(*args: Any, **kwargs: Any) -> Any:
        outer, itself, failed = backward_in_progress(), object(), True
        if outer != -1:
            outer_backwards.add(outer)
        _running_backwards.add(itself)
        try:
            result = run(*args, **kwargs)
            failed = False
            return result
        finally:
            outer_backwards.discard(outer)
            _running_backwards.discard(itself)
            ended(failed)

    autograd._engine_run_backward = followed


class OtherInputs(Protocol):
    """What takes the place of what `backward(inputs=...)` or `autograd.grad()` is asked for."""

    def run(
        self, backward: RunBackward, grads_of_outputs: Sequence[object], *, accumulates: bool, allows_unused: bool
    ) -> tuple[torch.Tensor | None, ...]:
        """Runs the backward, and returns what the caller asked for."""
        ...


def replace_inputs_of_backwards(choose: Callable[[Sequence[object]], OtherInputs | None]) -> None:
    """Calls `choose` with each sequence that a backward is given before it runs, until it returns something.

    What `backward(inputs=...)` and `autograd.grad()` are asked for is one of them; others are outputs and gradients.
    """
    # There is no hook for it: the engine does not touch an input that it cannot reach.
    autograd: Any = torch.autograd
    run = autograd._engine_run_backward

    @functools.wraps(run)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        for place, given in enumerate(args):
            other = choose(given) if isinstance(given, tuple | list) else None
            if other is None:
                continue
            # After the inputs `autograd.grad()` says whether they may be unused: leaves may, in any case.
            rest = args[place + 1 :]
            return other.run(
                lambda leaves: run(*args[:place], leaves, *(True for _ in rest), **kwargs),  # noqa: B023  runs at once
                args[1],
                accumulates=kwargs["accumulate_grad"],
                allows_unused=all(rest),
            )
        return run(*args, **kwargs)

    autograd._engine_run_backward = replaced


def explain_errors_of_backwards(explain: Callable[[RuntimeError], Exception | None]) -> None:
    """Raises what `explain` returns for an error of a backward in its place, if that is an error."""
    autograd: Any = torch.autograd
    run = autograd._engine_run_backward

    @functools.wraps(run)
    def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except RuntimeError as error:
            if (explanation := explain(error)) is not None:
                raise explanation from error
            raise

    autograd._engine_run_backward = explained


def after_this_backward(call: Callable[[], None]) -> None:
    """Calls `call` when the current backward pass has made all gradients."""
    torch.autograd.Variable._execution_engine.queue_callback(functools.partial(_call_in_python, call))


@torch.compiler.disable
def _call_in_python(call: Callable[[], None]) -> None:
    # Dynamo watches a backward that a compiled function calls.
    call()


def is_saved_by_autograd(tensor: torch.Tensor) -> bool:
    """Whether an autograd graph has read a leaf and still refers to it."""
    # One use is the Python object's.
    return tensor._use_count() > 1  # type: ignore[attr-defined]


def own_gradient(leaf: torch.Tensor) -> torch.Tensor | None:
    """The gradient that autograd accumulated into a leaf, whatever its class says `.grad` is."""
    with plain_torch_functions():
        return _GRAD.__get__(leaf)


def clear_own_gradient(leaf: torch.Tensor) -> None:
    """Clears the gradient that autograd accumulated into a leaf, whatever its class says `.grad` is."""
    with plain_torch_functions():
        _GRAD.__set__(leaf, None)


def allow_any_gradient_dtype(leaf: torch.Tensor) -> None:
    """Lets `leaf.grad` have another dtype than the leaf."""
    leaf.grad_dtype = None  # type: ignore[attr-defined, unused-ignore]  # newer than some stubs


def will_accumulate(node: torch.autograd.graph.Node | None) -> bool:
    """Whether the backward that runs puts a gradient into the leaf of an AccumulateGrad node.

    False in `torch.autograd.grad`, which returns gradients of leaves.
    """
    if node is None:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return False
