"""Every fault of the list can be planted; a sample of them is seen by the tests of the kernels."""

from __future__ import annotations

import shutil

import pytest

from host.faults import FAULTS, ROOT, first_failure

SAMPLE = ("wrap one row late", "dead rows of x unmasked", "accepted not clamped")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_fault_can_be_planted(fault, tmp_path):
    sources = tmp_path / "cuda"
    shutil.copytree(ROOT / "cuda", sources)
    fault.apply(sources)
    assert (sources / fault.file).read_text() != (ROOT / "cuda" / fault.file).read_text()


@pytest.mark.parametrize("name", SAMPLE)
def test_fault_is_seen(name):
    (fault,) = (fault for fault in FAULTS if fault.name == name)
    assert first_failure(fault) is not None
