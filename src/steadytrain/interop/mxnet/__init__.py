"""Checkpoints of MXNet: ``.params`` and symbol JSON of every era, read into torch and written again.

- :mod:`.files` finds the files that a name means; :mod:`.params` and :mod:`.symbol` read and write them, without torch.
- :mod:`.checkpoint` opens a pair; :mod:`.graph` makes a ``torch.fx.GraphModule`` of it, by the table of
  :mod:`.operators`.
- :mod:`.match` names its weights as timm's or torchvision's network; :mod:`.trace` writes a torch network for MXNet.
- :mod:`.states` reads the optimizer's momentum.
"""
