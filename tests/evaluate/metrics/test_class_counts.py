"""Which classes are taken for which; scikit-learn's counts are the reference."""

import pytest
import torch

from caveat.evaluate.metrics import by_class


def test_counts_and_recalls_are_scikit_learn_s():
    metrics = pytest.importorskip("sklearn.metrics")
    rng = torch.Generator().manual_seed(0)
    probs = torch.randn(200, 4, generator=rng).softmax(1)
    targets = torch.randint(0, 4, (200,), generator=rng)
    table = by_class(probs, targets)
    expected = torch.from_numpy(metrics.confusion_matrix(targets, probs.argmax(1)))
    assert torch.equal(table.counts, expected)
    recalls = torch.from_numpy(metrics.recall_score(targets, probs.argmax(1), average=None))
    torch.testing.assert_close(table.recall.double(), recalls, atol=1e-6, rtol=0)


def test_the_majority_and_classes_without_rows():
    probs = torch.eye(3)[[0, 1, 1, 1, 0]]
    table = by_class(probs, torch.tensor([0, 1, 1, 1, 1]))
    assert (table.majority_class, table.majority) == (1, 0.8)
    assert table.counts.tolist() == [[1, 0, 0], [1, 3, 0], [0, 0, 0]]
    assert table.recall[2].isnan()
