"""Saving and loading of networks: weights as safetensors, and all other settings that affect the output as JSON."""

import functools
import hashlib
import inspect
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn

from torchcaps.capsules import Prediction
from torchcaps.data.files import as_json, atomically, read_json
from torchcaps.errors import BadInput, first_line, unreadable
from torchcaps.models.foreign import is_foreign, keeping_random_state
from torchcaps.models.saved_rules import both_settings, cure_of, restore_rules, same_setting, saved_rules
from torchcaps.options import absent, bound_options, check_options, kinds_of, plain_options, registered_name
from torchcaps.routing import ROUTINGS

CONFIG, WEIGHTS = "config.json", "model.safetensors"
FORMAT = 5
Network = TypeVar("Network", bound="Pretrained")
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


class SavedConfig(NamedTuple):
    """Content of config.json.

    Arguments:
        format: version of the file format; always 5.
        model: name of the network in `MODELS`.
        options: all constructor arguments except ``routing``.
        routing: for each layer that has a rule, the name of the rule in `ROUTINGS` and the options of the rule.
        weights_sha256: SHA-256 checksum of model.safetensors, in hexadecimal.
        images: shape, resizing and preprocessing of the images, and names of the classes, as saved by `Classifier`;
            None if the network was saved without this information.
    """

    format: int
    model: str
    options: Mapping[str, Any]
    routing: Mapping[str, Any]
    weights_sha256: str
    images: Mapping[str, Any] | None


class Pretrained(nn.Module):
    """Base class of networks that can be saved, loaded and trained with `torchcaps train`.

    The attribute ``options`` contains all constructor arguments except ``routing``. These arguments must be numbers,
    strings or lists. The routing rule of each layer is saved separately.

    Example:
        >>> from torchcaps import PooledCapsNet
        >>> with TemporaryDirectory() as folder:
        ...     PooledCapsNet(num_classes=5).save_pretrained(folder)
        ...     PooledCapsNet.from_pretrained(folder).options["num_classes"]
        5
    """

    options: dict[str, Any]
    logits: ClassVar[bool] = False
    """Whether the scores of the network are logits. Otherwise they are activations in [0, 1]."""
    any_size: ClassVar[bool] = False
    """Whether the network accepts images of any height and width, not only those of its ``image_shape``."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        build = cls.__init__
        signature = inspect.signature(build)

        @functools.wraps(build)
        def remembering(self: Pretrained, *positional: Any, **named: Any) -> None:
            options = bound_options(cls.__name__, signature, (self, *positional), named)
            if not is_foreign(cls):
                check_options(cls.__name__, plain_options(cls.__name__, options), kinds_of(cls))
            build(self, *positional, **named)
            self.options = options

        cls.__init__ = remembering  # type: ignore[method-assign, assignment]

    if TYPE_CHECKING:

        def __call__(self, images: torch.Tensor, *inputs: Any, **options: Any) -> Prediction: ...

    def save_pretrained(self, folder: str | Path, *, images: Mapping[str, Any] | None = None) -> None:
        """Save the network as model.safetensors and config.json.

        Arguments:
            folder: folder to write to. If the folder exists, other files in it are not changed.
            images: shape and preprocessing of the images, and names of the classes. `Classifier.save_pretrained` passes
                this argument.

        Raises:
            BadInput: a routing rule is not in `ROUTINGS`, an option cannot be written as JSON, the network could not be
                loaded again, or the folder cannot be written to.
        """
        folder = Path(folder)
        options, routing = check_loadable(self)
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        content = safetensors.torch.save(weights, {"format": "pt"})
        checksum = hashlib.sha256(content).hexdigest()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"{folder} cannot be created ({error.strerror}): use another folder") from error
        config = SavedConfig(FORMAT, model_name(type(self)), options, routing, checksum, images)
        # Both files are written completely before they replace earlier files: a full disk damages no earlier file.
        with atomically(folder / CONFIG) as described:
            described.write(as_json(config._asdict()))
            described.flush()
            with atomically(folder / WEIGHTS) as stream:
                stream.write(content)

    @classmethod
    def from_pretrained(
        cls: type[Network], source: str | Path, *, revision: str | None = None, token: str | None = None, **changes: Any
    ) -> Network:
        """Load a saved network with all of its weights and options, in evaluation mode.

        Arguments:
            source: a folder written by `save_pretrained` or `torchcaps train`, or a repository on the Hugging Face Hub
                as ``"owner/name"``.
            revision: branch, tag or commit of the repository.
            token: access token for the repository.
            changes: constructor arguments that replace saved ones, such as ``im2col=True``. If ``routing`` is one of
                them, it is compared with the saved rule of each layer. Where both have the same name, only the options
                given in ``routing`` change; elsewhere, ``routing`` replaces the saved rule.

        Raises:
            BadInput: the folder or repository does not exist; a file is missing or damaged; the weights belong to
                another network; or an option in ``changes`` is unknown.
        """
        folder = local_folder(source, revision, token)
        config = read_config(folder)
        if config.model != model_name(cls):
            raise BadInput(
                f"{folder} contains the model {config.model!r}, not {model_name(cls)!r}: load it with "
                "torchcaps.Classifier.from_pretrained"
            )
        kinds = kinds_of(cls)
        check_options(cls.__name__, changes, kinds)
        kinds.pop("routing", None)
        path = folder / CONFIG
        if missing := absent(config.model, kinds, config.options):
            raise BadInput(f"{path} lacks the option {missing[0]!r} of {config.model}: save the network again")
        check_options(f"{path}: {config.model}", config.options, kinds, saved=True)
        weights = read_weights(folder / WEIGHTS, config.weights_sha256)
        model = _with_rules(cls, {**config.options, **changes}, weights, config.routing, changes.get("routing"), path)
        model._set_changes(changes)
        _set_weights(model, weights, folder / WEIGHTS)
        return model.eval()

    def _set_changes(self, changes: Mapping[str, Any]) -> None:
        """Set what ``changes`` of `from_pretrained` change in the saved rules. Some networks override this method."""

    def push_to_hub(self, repository: str, *, private: bool = False, token: str | None = None) -> str:
        """Upload the network to the Hugging Face Hub and return the URL.

        `Classifier.push_to_hub` also uploads the class names and the preprocessing of the images.

        Arguments:
            repository: ``"owner/name"``; created if it does not exist.
            private: whether a new repository is private.
            token: access token; the token of ``hf auth login`` by default.
        """
        return upload(self.save_pretrained, repository, private, token)


def upload(save: Callable[[str], object], repository: str, private: bool, token: str | None) -> str:
    """Upload the files that a function writes to a folder to the Hugging Face Hub, and return the URL."""
    from huggingface_hub import HfApi

    with TemporaryDirectory() as folder:
        save(folder)  # first of all, so that a network that cannot be saved leaves no empty repository
        api = HfApi(token=token)
        address = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder)
    return str(address)


def model_name(kind: type) -> str:
    """Return the key of a class in `MODELS`, or the name of the class if `MODELS` does not contain the class."""
    from torchcaps.models import MODELS

    return registered_name(kind, MODELS) or kind.__name__


def local_folder(source: str | Path, revision: str | None = None, token: str | None = None) -> Path:
    """Return ``source`` if it is a folder. If it is a repository on the Hugging Face Hub, download the repository.

    Raises:
        BadInput: ``source`` is neither a folder nor a repository that can be downloaded.
    """
    folder = Path(source)
    if os.path.isdir(folder):  # unlike Path.is_dir, also for names that are too long
        return folder
    if os.path.exists(folder):
        raise BadInput(
            f"{source} is a file: give a run folder of `torchcaps train` or a folder of weights; to use the state_dict "
            "of another program, create the network and call its load_state_dict"
        )
    if isinstance(source, Path) or not REPOSITORY.fullmatch(source):
        raise BadInput(f"{source} does not exist: give a run folder of `torchcaps train` or a folder of weights")
    from huggingface_hub import snapshot_download

    try:
        files = [CONFIG, WEIGHTS]
        return Path(snapshot_download(source, revision=revision, token=token, allow_patterns=files))
    except Exception as error:  # the client of the Hub raises its own errors and errors of three HTTP libraries
        raise BadInput(
            f"{source} is neither a folder nor a readable repository on the Hub ({first_line(error)}): check the name, "
            "the token and the network connection"
        ) from error


def read_config(folder: Path) -> SavedConfig:
    """Read config.json from a folder. Check that no entry is missing and that all entries have the right types.

    Raises:
        BadInput: config.json or model.safetensors is missing, or config.json is damaged.
    """
    path = folder / CONFIG
    for needed in (path, folder / WEIGHTS):
        if not needed.is_file():
            cure = "use a folder written by `torchcaps train` or save_pretrained"
            if (folder / "metrics.json").is_file():
                cure = "restore it from a copy of this run, or train again in another folder"
            elif (folder / "recipe.json").is_file():
                cure = "finish the training of this run with `torchcaps train` and --resume"
            raise BadInput(f"{folder} has no {needed.name}: {cure}")
    content = read_json(path, "save the network again")
    found = content.get("format") if isinstance(content, dict) else None
    if isinstance(found, int) and found > FORMAT:
        raise BadInput(f"{path} has format {found}, which a newer version of torchcaps wrote: update torchcaps")
    if found != FORMAT:
        raise BadInput(
            f"{path} is not a torchcaps configuration of format {FORMAT}: save the network again; if the file has an "
            f"older format, create the network with the options it was saved with, load {WEIGHTS} into it with "
            "safetensors.torch.load_model, and call save_pretrained of the network, or of its Classifier"
        )
    kinds = kinds_of(SavedConfig)
    for name in kinds:
        if name not in content:
            raise BadInput(f"{path} lacks {name!r}: save the network again")
    check_options(str(path), content, kinds, saved=True)
    return SavedConfig(**content)


def _built(cls: type, options: Mapping[str, Any]) -> Any:
    """Create a network without changing the random state.

    A network of torchcaps with a rule of torchcaps is created on the meta device, where its weights use no memory.
    Other networks and rules may have constants, which would have no values on the meta device.
    """
    from torchcaps.models import built

    routing: Any = options.get("routing")
    rule = ROUTINGS.get(getattr(routing, "name", routing), cls)
    foreign = is_foreign(cls) or is_foreign(rule)
    with torch.device("cpu" if foreign else "meta"), keeping_random_state(cls, rule):
        return built(model_name(cls), cls, options)


def _with_rules(
    cls: type, options: Mapping[str, Any], weights: Mapping[str, Any], saved: Mapping[str, Any], change: Any, path: Path
) -> Any:
    """Create a network and set its saved rules. If the weights do not fit, create it with the name of their rule."""
    model = _built(cls, options)
    restore_rules(model, saved, change, path)
    names = {rule["rule"] for rule in saved.values()}
    if len(names) == 1 and "routing" not in options and different_shapes(weights, model.state_dict()):
        with suppress(BadInput):
            named = _built(cls, {**options, "routing": names.pop()})
            restore_rules(named, saved, change, path)
            return model if different_shapes(weights, named.state_dict()) else named
    return model


def check_loadable(model: Pretrained) -> tuple[dict[str, Any], dict[str, Any]]:
    """Check that `Pretrained.from_pretrained` could load a network. Return its options and rules, as they are saved.

    Raises:
        BadInput: a routing rule is not in `ROUTINGS`, an option cannot be written as JSON, or a network created with
            the saved options and rules would have other weights.
    """
    kind = type(model).__name__
    constructor = inspect.signature(type(model).__init__).parameters.values()
    if any(parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) for parameter in [*constructor][1:]):
        raise BadInput(
            f"{kind} cannot be saved, because its constructor takes * or ** arguments: use only named arguments"
        )
    routing, options = saved_rules(model), plain_options(kind, model.options)
    weights = model.state_dict()
    for name in weights:
        if "_orig_mod." in name or "parametrizations." in name or not isinstance(weights[name], torch.Tensor):
            raise BadInput(
                f"weight {name} belongs to a layer that is compiled, parametrized or quantized: use the original "
                "layer, or remove the parametrization, and save the network again; if you need the layer as it is, "
                "save model.state_dict()"
            )
    _check_shared(kind, weights)
    try:
        check_options(kind, options, kinds_of(type(model)))
        again = _built(type(model), options)
    except BadInput as error:
        raise BadInput(
            f"{kind} cannot be saved, because from_pretrained could not create it ({error}): save model.state_dict()"
        ) from error
    if changed := sorted(routing.keys() ^ saved_rules(again).keys()):
        raise BadInput(
            f"{kind} cannot be saved, because from_pretrained would create a network with another layer "
            f"{changed[0]}: undo the change of this layer, or save model.state_dict()"
        )
    again = _with_rules(type(model), options, weights, routing, None, Path(CONFIG))
    if different := different_shapes(weights, again.state_dict()):
        name, here, there = different
        raise BadInput(
            f"{kind} cannot be saved, because from_pretrained would create a network with other weights ({name} is "
            f"{here} here, but would be {there}): undo the change of this layer, or save model.state_dict()"
        )
    here, there = both_settings(model, again)
    for setting in [*here, *there]:
        if not same_setting(here.get(setting), there.get(setting)):
            layer, attribute = setting
            raise BadInput(
                f"{kind} cannot be saved, because from_pretrained would create another layer {layer or kind} "
                f"({attribute} is {here.get(setting)!r} here, but would be {there.get(setting)!r}): "
                f"{cure_of(model, layer, attribute)}, or save model.state_dict()"
            )
    return options, routing


def different_shapes(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Return the name of the first weight whose shape differs, and its shape, or "absent", in both networks."""
    for name in sorted(one.keys() | other.keys()):
        here, there = ([*weights[name].shape] if name in weights else "absent" for weights in (one, other))
        if here != there:
            return name, here, there
    return None


def _check_shared(kind: str, weights: Mapping[str, torch.Tensor]) -> None:
    """Raise `BadInput` if two weights of a network share memory, because they could not be saved separately."""
    stored = {name: x for name, x in weights.items() if x.numel() and not x.is_meta}
    places = [(str(x.device), x.data_ptr(), x.nbytes, name) for name, x in stored.items()]
    for (device, start, size, name), (other_device, other_start, _, other) in pairwise(sorted(places)):
        if device == other_device and other_start < start + size:
            raise BadInput(
                f"{kind} has weights that share memory ({name} and {other}): give each layer its own "
                "weights, or save model.state_dict()"
            )


def read_weights(path: Path, checksum: str) -> dict[str, torch.Tensor]:
    """Read a file of weights and verify its checksum.

    Arguments:
        path: model.safetensors.
        checksum: SHA-256 checksum of the file, in hexadecimal.

    Raises:
        BadInput: the file is damaged, or a weight is NaN.
    """
    try:
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != checksum:
            raise BadInput(f"{path} is damaged or does not belong to {CONFIG}: save the network again")
        weights = safetensors.torch.load(content)
    except (OSError, LookupError, SafetensorError) as error:
        raise unreadable(path, error, "save the network again") from error
    if spoiled := [name for name, x in weights.items() if x.is_floating_point() and x.float().isnan().any()]:
        raise BadInput(f"{spoiled[0]} in {path} contains NaN, so the network cannot predict: train it again")
    return weights


def _set_weights(model: nn.Module, weights: Mapping[str, torch.Tensor], path: Path) -> None:
    """Set the weights of a network, which were read from ``path``. Raise `BadInput` if they do not fit the network."""
    if different := different_shapes(model.state_dict(), weights):
        name, here, there = different
        raise BadInput(
            f"the weights in {path} do not fit this {type(model).__name__} ({name} is {here} in the network, but "
            f"{there} in the file): use the options that the network was saved with"
        )
    for name, tensor in model.state_dict(keep_vars=True).items():
        kinds = [(one.is_floating_point(), one.is_complex()) for one in (weights[name], tensor)]
        if isinstance(tensor, nn.Parameter) and kinds[0] != kinds[1]:
            found, own = (str(one.dtype).removeprefix("torch.") for one in (weights[name], tensor))
            raise BadInput(f"{name} in {path} has dtype {found}, but {own} in the network: restore the file")
    # The loaded tensors may be unaligned in memory. The kernels would copy unaligned tensors in every call.
    aligned = {name: tensor.clone() for name, tensor in weights.items()}
    model.load_state_dict(aligned, assign=True)
