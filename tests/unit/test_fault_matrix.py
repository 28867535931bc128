"""The README's fault matrix: made from the record, and every cell of that from a test."""

import re

import pytest

from apps.bench import fault_matrix
from apps.bench.fault_matrix import BEGIN, END, PHASES
from tests.fault.matrix import OTHERS

CELLS = fault_matrix.read()


def test_the_readme_shows_the_record(root):
    shown = (root / "README.md").read_text().split(BEGIN)[1].split(END)[0].strip()
    made = fault_matrix.markdown().strip()
    assert shown == made, "python -m apps.bench.fault_matrix prints what belongs there"


@pytest.mark.parametrize("test", sorted({cell.test for cell in CELLS}))
def test_every_cell_names_a_test_that_exists(root, test):
    file, name = test.split("::")
    assert re.search(rf"^(async )?def {name}\(", (root / file).read_text(), re.MULTILINE), test


def test_cells_of_other_tests_are_on_record():
    assert set(OTHERS) <= set(CELLS)


def test_generator_and_quantizer_are_killed_in_every_phase():
    for fault in ("generator killed", "quantizer killed"):
        assert {cell.phase for cell in CELLS if cell.fault == fault} == set(PHASES)
