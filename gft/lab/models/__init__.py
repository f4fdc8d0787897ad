from gft.lab.models.dnn import DNN

__all__ = ["DNN"]
