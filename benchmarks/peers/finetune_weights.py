"""MobileNetV2 with the ImageNet weights that all contenders of ``finetune_peers.py`` start from, by timm's API."""

import timm
from safetensors.torch import load_file

NAME = "mobilenetv2_100"
MEAN = STD = (0.5, 0.5, 0.5)  # Google trained it for TensorFlow: pixels in -1 to 1, and SAME padding


def network(weights, num_classes):
    """Build the network; ``num_classes`` 0: its features. A classifier of other classes begins anew."""
    net = timm.create_model(NAME, num_classes=num_classes, pad_type="same")
    state = load_file(weights)
    if num_classes != 1000:
        state = {name: value for name, value in state.items() if not name.startswith("classifier.")}
    missing, unexpected = net.load_state_dict(state, strict=False)
    assert not unexpected and all(name.startswith("classifier.") for name in missing), (missing, unexpected)
    return net
