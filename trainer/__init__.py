"""The RL trainer beside precgraph: GRPO on one machine, with the rollout's numbers in the update.

Read it in this order: :mod:`trainer.config`, :mod:`trainer.loop`, :mod:`trainer.rollout`, :mod:`trainer.update`,
:mod:`trainer.loss`, :mod:`trainer.optim`.
"""
