from gft.lab.models.cnn import CNN
from gft.lab.models.dnn import DNN
from gft.lab.models.gpt import GPT
from gft.lab.models.llama import Llama
from gft.lab.models.resnet import ResNet
from gft.lab.models.vit import ViT

__all__ = ["CNN", "DNN", "GPT", "Llama", "ResNet", "ViT"]
