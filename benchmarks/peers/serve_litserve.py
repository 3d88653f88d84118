"""LitServe as its documents have it: JSON with an image in base64, Pillow and torchvision, batches of up to so many.

usage: python serve_litserve.py WEIGHTS MODEL PORT MAX_BATCH
"""

import base64
import io
import sys

import litserve
import timm
import torch
from PIL import Image
from torchvision import transforms


class API(litserve.LitAPI):
    def setup(self, device):
        self.model = timm.create_model(sys.argv[2].removeprefix("timm/"))
        self.model.load_state_dict(torch.load(sys.argv[1], weights_only=True))
        self.model.eval()
        normalize = transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
        steps = [transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor(), normalize]
        self.prepare = transforms.Compose(steps)

    def decode_request(self, request):
        return self.prepare(Image.open(io.BytesIO(base64.b64decode(request["image"]))).convert("RGB"))

    def batch(self, images):
        return torch.stack(images)

    def predict(self, images):
        with torch.inference_mode():
            return self.model(images).softmax(1).topk(5)

    def unbatch(self, output):
        return list(zip(output.values.tolist(), output.indices.tolist(), strict=True))

    def encode_response(self, output):
        probabilities, classes = output
        return {"classes": classes, "probabilities": probabilities}


if __name__ == "__main__":
    api = API(max_batch_size=int(sys.argv[4]), batch_timeout=0.005)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=int(sys.argv[3]), generate_client_file=False, log_level="error")
