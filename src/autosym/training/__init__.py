"""``fit`` and the learner of a user's own loop: schedule, steps, checkpoints, callbacks."""
