"""Settings of torch are put back, after errors too, and by one thread at a time."""

import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from caveat.engine.row_gradients import Jacobian
from caveat.engine.torch_settings import full_precision, hide_own_warnings
from tests.engine.row_gradients.row_reference import Custom, assert_right, network, normal, reference


def precisions() -> list[str]:
    settings = torch.backends.cudnn.conv, torch.backends.cudnn.rnn, torch.backends.cuda.matmul
    return [setting.fp32_precision for setting in settings]


def test_full_precision_puts_back_what_was_set_even_after_an_error() -> None:
    before, found = precisions(), []

    def failing() -> None:
        with full_precision(torch.device("cuda")):
            found.extend(precisions())
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert found == ["ieee"] * 3
    assert precisions() == before
    assert torch.get_float32_matmul_precision() == "highest"  # torch's older name for it can still be asked for


def test_full_precision_is_for_one_thread_at_a_time() -> None:
    """Or the second would put back what the first has set."""
    before, entered = precisions(), threading.Event()

    def other() -> None:
        with full_precision(torch.device("cuda")):
            entered.set()

    thread = threading.Thread(target=other)
    with full_precision(torch.device("cuda")):
        thread.start()
        assert not entered.wait(0.2)
    thread.join()
    assert entered.is_set()
    assert precisions() == before


def test_settings_of_a_gpu_are_left_alone_on_a_cpu() -> None:
    """A module may ask for them by their older names, which torch refuses once the newer ones were set apart."""

    def run(self: Any, x: Tensor) -> Tensor:
        with torch.backends.cudnn.flags(enabled=False):
            return self.a(x)

    net, x = network(Custom(run, a=nn.Linear(4, 3))), normal(4)
    assert_right(Jacobian(net, net.params(), x), x, reference(net, x))


@pytest.mark.parametrize(
    ("message", "module"),
    [
        ("Synchronization debug mode is a prototype feature and does not yet detect all", "torch.cuda"),
        ("\nOnline softmax is disabled on the fly since Inductor decides to\nsplit", "torch._inductor.lowering"),
    ],
)
def test_torch_is_not_heard_of_its_own_work_and_others_are(message: str, module: str) -> None:
    """As torch 2.11 says it on a GPU."""
    hide_own_warnings()
    warnings.warn_explicit(message, UserWarning, "a.py", 1, module)
    for other in ((message, "mine"), ("Something else", module)):
        with pytest.raises(UserWarning):
            warnings.warn_explicit(other[0], UserWarning, "a.py", 1, other[1])
