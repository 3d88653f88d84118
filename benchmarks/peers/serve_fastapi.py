"""A plain FastAPI application, as tutorials have it: an image a request, no batches.

usage: python serve_fastapi.py WEIGHTS MODEL PORT
"""

import io
import sys

import timm
import torch
import uvicorn
from fastapi import FastAPI, Request
from PIL import Image
from torchvision import transforms

app = FastAPI()
model = timm.create_model(sys.argv[2].removeprefix("timm/"))
model.load_state_dict(torch.load(sys.argv[1], weights_only=True))
model.eval()
normalize = transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
prepare = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor(), normalize])


@app.get("/health")
async def health():
    return {"status": "alive"}


@app.post("/predict")
async def predict(request: Request):
    image = prepare(Image.open(io.BytesIO(await request.body())).convert("RGB"))
    with torch.inference_mode():
        probabilities, classes = model(image[None])[0].softmax(0).topk(5)
    return {"classes": classes.tolist(), "probabilities": probabilities.tolist()}


uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[3]), log_level="error", access_log=False)
