"""Where people work: posteriors inside other libraries. Each file needs the library of its name, an extra.

    sklearn        CaveatClassifier, CaveatRegressor: estimators, from arrays to a posterior
    lightning      PosteriorCallback: a Lightning trainer's network becomes a posterior at its end
    transformers   PosteriorCallback: the same for a Hugging Face `Trainer`
    botorch        PosteriorModel: a posterior as a BoTorch model, differentiable in its inputs
    torchmetrics   PosteriorScores: our scores by update and compute
    mlflow, wandb  log_posterior: knobs, scores and the posterior's folder in a run

Both callbacks collect what the posterior needs with `collected.py`, both trackers log what `logged.py` makes flat.
Users import from these files; nothing in the package does.
"""
