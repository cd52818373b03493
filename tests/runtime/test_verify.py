"""What counts as different from one device."""

from __future__ import annotations

import pytest
import torch

from autopar.errors import VerificationError
from autopar.runtime.verify import RankErrors, VerifyReport, _worst


def row(**changes: object) -> RankErrors:
    values = {"rank": 1, "losses": (1.0,), "loss": 0.0, "gradient": 0.0, "parameter": 0.0}
    return RankErrors(**{**values, "gradient_name": "g", "parameter_name": "p", **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": 2e-5}, r"rank 1: losses agree .*1e-05, but found 2\.00e-05"),
        ({"gradient": 2e-4}, r"rank 1: gradients of the first step .*2\.00e-04 for g"),
        ({"parameter": float("inf")}, r"rank 1: parameters after 3 AdamW steps .*inf for p"),
    ],
)
def test_what_exceeds_the_tolerance_is_named(changes: dict[str, float], message: str) -> None:
    report = VerifyReport(steps=3, reference_losses=(1.0,), rows=(row(rank=0), row(**changes)))
    assert not report.passed
    with pytest.raises(VerificationError, match=message):
        report.check()


def test_a_good_report_passes() -> None:
    report = VerifyReport(steps=3, reference_losses=(1.0,), rows=(row(loss=9e-6, gradient=9e-5),))
    assert report.passed
    report.check()


def test_missing_and_undefined_tensors_are_infinitely_wrong() -> None:
    reference = {"a": torch.ones(2), "b": torch.ones(2)}
    assert _worst({"a": torch.ones(2)}, reference) == ("b", float("inf"))
    assert _worst({"a": torch.ones(2), "b": torch.tensor([1.0, float("nan")])}, reference) == ("b", float("inf"))


def test_the_worst_tensor_is_the_one_with_the_largest_relative_error() -> None:
    reference = {"large": torch.full((2,), 100.0), "small": torch.full((2,), 0.1)}
    found = {"large": torch.full((2,), 100.1), "small": torch.full((2,), 0.101)}
    name, error = _worst(found, reference)
    assert name == "small"
    assert error == pytest.approx(0.01, rel=1e-4)


def test_a_tensor_of_rounding_noise_is_measured_against_the_others() -> None:
    reference = {"large": torch.ones(2), "noise": torch.full((2,), 1e-9)}
    found = {"large": torch.ones(2), "noise": torch.zeros(2)}
    assert _worst(found, reference)[1] == pytest.approx(1e-3, rel=1e-4)
