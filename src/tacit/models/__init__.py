"""The papers' networks, a default for each kind of record, networks by name, `make_trainable`.

A network here is an ordinary `torch.nn.Module`; any other module can be trained in the same way.
`make_trainable` replaces the parts of a model that mix records, such as BatchNorm, and
`register_model` gives a network of your own a name for the command line and for saved runs.
"""

from tacit.models.architectures import Architecture, register_model, registered_models
from tacit.models.lipschitz_networks import (
    lipschitz_lenet,
    lipschitz_linear,
    lipschitz_mixer,
    lipschitz_mlp,
    lipschitz_resnet,
    lipschitz_vgg,
)
from tacit.models.make_trainable import Trainable, make_trainable
from tacit.models.networks import (
    TemperedSigmoid,
    cifar_cnn,
    convnet,
    default_model,
    lenet,
    lenet5,
    mlp,
    mlp_mixer,
    mnist_cnn,
    scattering_cifar_cnn,
    scattering_linear,
    scattering_mnist_cnn,
    vgg,
)
from tacit.models.residual import (
    Norm,
    WeightStandardised,
    WeightStandardisedConv2d,
    gpt,
    group_norm,
    next_token_loss,
    resnet,
    resnet18,
    wide_resnet,
)

__all__ = [
    "Architecture", "Norm", "TemperedSigmoid", "Trainable", "WeightStandardised",
    "WeightStandardisedConv2d", "cifar_cnn", "convnet", "default_model", "gpt", "group_norm",
    "lenet", "lenet5", "lipschitz_lenet", "lipschitz_linear", "lipschitz_mixer",
    "lipschitz_mlp", "lipschitz_resnet", "lipschitz_vgg", "make_trainable", "mlp", "mlp_mixer",
    "mnist_cnn", "next_token_loss", "register_model", "registered_models", "resnet", "resnet18",
    "scattering_cifar_cnn", "scattering_linear", "scattering_mnist_cnn", "vgg", "wide_resnet",
]  # fmt: skip
