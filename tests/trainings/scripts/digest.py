"""What every training here prints last: a hash of the weights, and how many steps were taken."""

import hashlib


def report(steps, *models):
    sha = hashlib.sha256()
    for model in models:
        for value in model.state_dict().values():
            local = value.to_local() if hasattr(value, "to_local") else value
            sha.update(local.detach().float().contiguous().numpy().tobytes())
    print("weights", sha.hexdigest()[:16], "steps", steps, flush=True)
