import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestNeighbors

import caveat
from caveat import data
from caveat.evaluate.feature_distance import FeatureDistance
from caveat.evaluate.feature_distance.distances import NEIGHBOUR
from caveat.models import mlp


def features(n, seed):
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (n,), generator=rng)
    centres = 3 * torch.randn(3, 5, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    mixing = torch.randn(5, 5, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    return centres[labels] + torch.randn(n, 5, generator=rng, dtype=torch.float64) @ mixing, labels


def test_distances_are_their_definitions():
    known, labels = features(200, 0)
    new, _ = features(30, 1)
    found = FeatureDistance.from_features(None, known, labels).of_features(new)
    means = [known[labels == c].mean(0) for c in range(3)]
    within = torch.cat([known[labels == c] - means[c] for c in range(3)])
    precision = torch.linalg.inv(within.T @ within / len(within))
    squares = torch.stack([((new - mean) @ precision * (new - mean)).sum(1) for mean in means], 1)
    torch.testing.assert_close(found["mahalanobis"], squares.amin(1), rtol=1e-2, atol=0)

    def directions(x):
        return (x / x.norm(dim=1, keepdim=True)).numpy()

    theirs = NearestNeighbors(n_neighbors=NEIGHBOUR).fit(directions(known)).kneighbors(directions(new))[0][:, -1]
    np.testing.assert_allclose(found["knn"].numpy(), theirs, atol=1e-6)


def test_features_that_never_vary_are_far_where_they_do():
    known, labels = features(100, 0)
    known[:, 2] = 0
    distance = FeatureDistance.from_features(None, known, labels)
    moved = known.clone()
    moved[:, 2] = 1
    before, after = (distance.of_features(x)["mahalanobis"] for x in (known, moved))
    assert before.isfinite().all()
    assert (after > before + 100).all()


@pytest.fixture(scope="module")
def digits():
    whole = data.load("digits")
    torch.manual_seed(0)
    task = caveat.Task(mlp(64, 10, (32,)), whole.train, caveat.Categorical())
    training = caveat.Training(epochs=15, learning_rate=0.01)
    return whole, caveat.fit(task, caveat.MAP(training=training), progress=False)


def test_evaluate_scores_them_beside_entropy(digits, tmp_path):
    whole, posterior = digits
    ood = {"permuted": data.out_of_distribution("permuted", whole)}
    scores = caveat.evaluate(
        posterior, {"clean": whole.test}, ood=ood, training=whole.train, folder=tmp_path, progress=False
    )
    found = scores["permuted"]
    for name in ("entropy", "mahalanobis", "knn"):
        assert 0.7 < found[f"auroc_{name}"].mean <= 1
    assert found["auroc_mahalanobis"].mean > 0.95
    assert "auroc_knn" not in scores["clean"].metrics
    with np.load(tmp_path / "predictions" / "permuted.npz") as arrays:
        assert arrays["knn"].shape == arrays["mahalanobis"].shape == arrays["entropy"].shape
    plain = caveat.evaluate(posterior, {"clean": whole.test}, ood=ood, progress=False)["permuted"]
    assert set(found.metrics) - set(plain.metrics) == {
        f"{metric}_{name}" for metric in ("auroc", "aupr", "fpr95") for name in ("mahalanobis", "knn")
    }


def test_a_regression_has_one_mean():
    rows = data.load("diabetes")
    torch.manual_seed(0)
    task = caveat.Task(mlp(10, 1), rows.train, caveat.Gaussian(standardise=True))
    posterior = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=20)), progress=False)
    x, _ = rows.test.tensors
    far = {"far": torch.utils.data.TensorDataset(x + 5)}
    scores = caveat.evaluate(posterior, {"clean": rows.test}, ood=far, training=rows.train, progress=False)["far"]
    assert scores["auroc_mahalanobis"].mean > 0.95
    assert scores["auroc_knn"].mean > 0.5
