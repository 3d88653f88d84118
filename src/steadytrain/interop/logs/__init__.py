"""Logs of other trainers, read as runs: MXNet, timm, torchvision, DLLogger, CSV files of Lightning, Keras and timm.

Nothing here judges or draws: a reader yields the events of our own schema, and the one fold and the one report serve.
"""

from steadytrain.interop.logs.mxnet import format_epochs as format_epochs
from steadytrain.interop.logs.read import may_be_log as may_be_log
from steadytrain.interop.logs.read import read_log as read_log
from steadytrain.interop.logs.run import LogEpoch as LogEpoch
from steadytrain.interop.logs.run import LogRun as LogRun
