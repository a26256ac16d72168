"""The page of `torchcaps explore`, built with Gradio and served on the loopback address."""

import os
import re
from collections import OrderedDict
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import RLock
from typing import Any

import numpy as np

from torchcaps.data.norb import CATEGORIES
from torchcaps.data.toys import AZIMUTHS, ELEVATIONS, LIGHTINGS
from torchcaps.errors import BadInput
from torchcaps.explore import Explorer, Rules, View, redrawn, toy_view

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"

import gradio as gr
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

SLIDERS = 16
"""Largest number of sliders. Each slider changes one number of the pose of a class capsule."""
MOST_BYTES = 2**28
"""Size of the results that stay in memory."""
PROMPT = "Draw a digit, or upload an image."
POLICY = (
    "default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval'; connect-src 'self' data: blob:; "
    "font-src 'self' data:; object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
)
"""Content security policy: the browser loads nothing from another address."""
TO_URL = """(network, rule, iterations, epsilon, number, category, instance, elevation, azimuth, lighting) => {
    const state = {network, rule, iterations, epsilon, pass: number, category, instance, elevation, azimuth, lighting};
    history.replaceState(null, "", "?" + new URLSearchParams(state));
}"""
CSS = """.picture > label {
    position: static; width: fit-content; max-width: calc(100% - 2.5em); white-space: normal; overflow: visible;
}
body:not(.dark) button[role=tab][aria-selected=true] { color: #c2410c; }
input[type=range]:focus-visible { outline: 2px solid #c2410c; outline-offset: 4px; }
.block:not(:focus-within) [role=listbox] { display: none; }"""
"""Puts the label of a picture above it instead of on it, gives the selected tab the contrast of WCAG AA, marks the
slider that has the focus, and closes the list of a control that has lost the focus."""
ON_LOAD = """() => {
    document.querySelector("#message").setAttribute("aria-live", "polite");
    const wait = setInterval(() => {
        const brush = document.querySelector("#drawing button[aria-label=Brush]");
        if (brush) { brush.click(); clearInterval(wait); }
    }, 100);
}"""


class SameOrigin:
    """ASGI middleware that refuses requests of pages from another origin, and adds the content security policy."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def with_policy(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"content-security-policy", POLICY.encode())]
            await send(message)

        headers = dict(scope.get("headers", []))
        origin = headers.get(b"origin")
        if origin is not None and origin.partition(b"://")[2] != headers.get(b"host"):
            await send({"type": "http.response.start", "status": 403, "headers": []})
            await send({"type": "http.response.body", "body": b"requests from other pages are refused"})
            return
        await self.app(scope, receive, with_policy)


def escaped(text: str) -> str:
    """Escape the characters that Markdown and HTML interpret."""
    return re.sub(r"([\\`*_{}\[\]<>()#+!|&$~-])", r"\\\1", text)


class Callbacks:
    """Functions that compute the new values of the page's components after a control has changed.

    Arguments:
        explorer: the networks to explore.
    """

    def __init__(self, explorer: Explorer) -> None:
        self.explorer = explorer
        self.views: OrderedDict[Any, View] = OrderedDict()
        self.lock = RLock()

    def show(
        self,
        network: str,
        source: str,
        drawing: Any,
        file: str | None,
        rule: str,
        iterations: float,
        epsilon: float,
        number: float,
        class_name: str | None,
        *toy: Any,
    ) -> list[Any]:
        """Run the network on the image, and show all results; the support is that of the chosen class."""
        try:
            rules = self.explorer.rules(network)
            pixels = self._pixels(network, source, drawing, file, toy)
            if pixels is None:
                return _empty(PROMPT)
            view = self._view(network, pixels, rule, int(iterations or 1) if rules.iterations else 0, epsilon or 0.0)
            pose = view.found.poses[view.found.best].flatten().tolist()
            drawable = view.found.reconstruction is not None
            drawn = redrawn(self.explorer.classifier(network), view.found, pose) if drawable else None
        except (BadInput, ValueError, RuntimeError, OSError) as error:
            said = str(error) if file is None else str(error).replace(file, Path(file).name)
            return _empty(escaped(said))
        names = view.names()
        chosen = class_name if class_name in names else names[view.found.best]
        passes = len(view.found.support)
        number = min(int(number or 1), passes)
        return [
            escaped(view.sentence()),
            view.picture(),
            view.support(number, names.index(chosen)),
            view.bars(),
            view.pose(),
            escaped(view.numbers()),
            gr.Dropdown(choices=names, value=chosen),
            gr.Slider(maximum=max(2, passes), value=number),
            gr.Image(value=drawn, visible=drawable),
            (network, view),
            *_pose_sliders(pose if drawable else []),
        ]

    def show_best(self, *values: Any) -> list[Any]:
        """Do the same as `show`, with the support of the predicted class."""
        return self.show(*values[:8], None, *values[9:])

    def show_support(self, state: Any, number: float, class_name: str | None) -> Any:
        """Show the support of another class or iteration."""
        if state is None:
            return None
        view = state[1]
        names = view.names()
        return view.support(int(number or 1), names.index(class_name) if class_name in names else view.found.best)

    def draw_pose(self, state: Any, *pose: float) -> Any:
        """Show the reconstruction from the pose on the sliders."""
        if state is None or state[1].found.reconstruction is None:
            return None
        network, view = state
        own = view.found.poses[view.found.best].flatten().tolist()
        return redrawn(self.explorer.classifier(network), view.found, [*pose[: len(own)], *own[SLIDERS:]])

    def choose(self, network: str) -> list[Any]:
        """Show the rule and the iterations of another network, and the tab with the toys if it reads stereo pairs."""
        try:
            rules = self.explorer.rules(network)
        except BadInput as error:
            return [gr.skip(), gr.skip(), gr.skip(), escaped(str(error))]
        return [
            gr.Dropdown(choices=rules.fitting, value=rules.own),
            _iterations_slider(rules, rules.iterations),
            gr.Tab(visible=self._reads_toys(network)),
            gr.skip(),
        ]

    def from_url(self, request: gr.Request) -> list[Any]:
        """Set the controls to the values in the URL. An unknown or invalid value is replaced by the default."""
        asked, names = dict(request.query_params), [*self.explorer.sources]

        def whole(key: str, default: int, values: Any) -> int:
            value = asked.get(key, "")
            return int(value) if re.fullmatch("[0-9]{1,3}", value) and int(value) in values else default

        network = asked.get("network", names[0])
        network = network if network in names else names[0]
        try:
            rules = self.explorer.rules(network)
        except BadInput as error:
            return [escaped(str(error)), network, *[gr.skip()] * 10]
        rule = asked.get("rule", rules.own)
        epsilon = asked.get("epsilon", "0")
        category = asked.get("category", "")
        iterations = whole("iterations", rules.iterations, range(1, max(8, rules.iterations + 1)))
        number = whole("pass", 3, range(1, 8))
        return [
            PROMPT,
            network,
            gr.Dropdown(choices=rules.fitting, value=rule if rule in rules.fitting else rules.own),
            _iterations_slider(rules, iterations),
            min(0.3, float(epsilon)) if re.fullmatch(r"[0-9](\.[0-9]{0,3})?", epsilon) else 0.0,
            gr.Slider(value=number, maximum=max(3, number)),
            category if category in CATEGORIES else CATEGORIES[0],
            whole("instance", 0, range(10)),
            whole("elevation", 4, ELEVATIONS),
            whole("azimuth", 0, AZIMUTHS),
            whole("lighting", 0, LIGHTINGS),
            gr.Tab(visible=self._reads_toys(network)),
        ]

    def _view(self, network: str, pixels: Any, rule: str, iterations: int, epsilon: float) -> View:
        key = network, pixels.numpy().tobytes(), rule, iterations, epsilon
        with self.lock:
            view = self.views.get(key)
            if view is None:
                view = self.views[key] = self.explorer.view(network, pixels, rule, iterations, epsilon)
                while len(self.views) > 1 and sum(one.found.support.nbytes for one in self.views.values()) > MOST_BYTES:
                    self.views.popitem(last=False)
        return view

    def _pixels(self, network: str, source: str, drawing: Any, file: str | None, toy: tuple[Any, ...]) -> Any:
        if source == "file":
            return None if file is None else self.explorer.read(network, file)
        if source == "toy":
            category, *numbers = toy
            shape = self.explorer.classifier(network).image_shape
            return toy_view(shape, CATEGORIES.index(category), *(int(number or 0) for number in numbers))
        strokes = None if drawing is None else [layer[..., 3] for layer in drawing["layers"]]
        if not strokes or not any(layer.any() for layer in strokes):
            return None
        return self.explorer.drawn(network, np.max(strokes, axis=0))

    def _reads_toys(self, network: str) -> bool:
        return self.explorer.classifier(network).image_shape[0] == 2


def _empty(message: str) -> list[Any]:
    """Show a message instead of results."""
    no_picture = gr.Image(value=None, visible=False)
    return [message, None, None, None, None, "", gr.skip(), gr.skip(), no_picture, None, *_pose_sliders([])]


def _pose_sliders(pose: list[float]) -> list[Any]:
    bound = max([1.0, *map(abs, pose)])
    shown = [gr.Slider(value=value, minimum=-bound, maximum=bound, visible=True) for value in pose[:SLIDERS]]
    return shown + [gr.Slider(visible=False)] * (SLIDERS - len(shown))


def _iterations_slider(rules: Rules, value: int) -> Any:
    return gr.Slider(value=max(1, value), maximum=max(7, rules.iterations), visible=rules.iterations > 0)


def _image(label: str, name: str, **options: Any) -> Any:
    options |= {"buttons": ["download"], "format": "png"}
    return gr.Image(label=label, alt_text=label, elem_id=name, elem_classes="picture", **options)


def build(explorer: Explorer) -> Any:
    """Build the page that shows an explorer's networks."""
    names, callbacks = [*explorer.sources], Callbacks(explorer)
    with gr.Blocks(title="torchcaps", analytics_enabled=False, delete_cache=(3600, 3600)) as page:
        gr.Markdown(
            "# torchcaps\nDraw a digit or upload an image. The network predicts its class, and the pictures show which "
            "parts of the image support the class. Everything runs on this machine."
        )
        source, state = gr.State("draw"), gr.State(None)
        with gr.Row():
            with gr.Column(scale=1):
                network = gr.Dropdown(names, value=names[0], label="Network", elem_id="network")
                with gr.Tab("Draw") as draw_tab:
                    drawing = gr.Sketchpad(
                        label="Your drawing",
                        layers=False,
                        canvas_size=(280, 280),
                        brush=gr.Brush(default_size=22, colors=["#111111"], color_mode="fixed"),
                        elem_id="drawing",
                    )
                with gr.Tab("Upload") as file_tab:
                    file = gr.File(label="Image (bmp, gif, jpeg, png, tiff or webp)", type="filepath", elem_id="file")
                with gr.Tab("Toy", visible=False) as toy_tab:
                    category = gr.Dropdown(list(CATEGORIES), value=CATEGORIES[0], label="Category of the toy")
                    instance = gr.Slider(0, 9, 0, step=1, label="Number of the toy in its category")
                    elevation = gr.Slider(0, 8, 4, step=1, label="Elevation (0 to 8: 30° to 70°)", elem_id="elevation")
                    azimuth = gr.Slider(0, 34, 0, step=2, label="Azimuth (× 10°)", elem_id="azimuth")
                    lighting = gr.Slider(0, 5, 0, step=1, label="Lighting (0 to 5)")
                rule = gr.Dropdown(label="Routing rule", elem_id="rule")
                iterations = gr.Slider(1, 7, 3, step=1, label="Routing iterations", elem_id="iterations")
                label = "Attack (FGSM): largest change of a pixel, ε (0: no attack)"
                epsilon = gr.Slider(0, 0.3, 0, step=0.01, label=label, elem_id="epsilon")
            with gr.Column(scale=2):
                message = gr.Markdown(elem_id="message")
                with gr.Row():
                    picture = _image("Input of the network", "picture")
                    support = _image("Parts of the image that support the class", "support")
                with gr.Row():
                    class_name = gr.Dropdown(label="Class whose support is shown", elem_id="class")
                    number = gr.Slider(1, 3, 3, step=1, label="Iteration whose support is shown", elem_id="pass")
                bars = gr.Label(label="Highest scores", num_top_classes=10, elem_id="bars")
                with gr.Row():
                    with gr.Column():
                        pose = _image("Pose of the predicted class (blue: negative, red: positive)", "pose")
                        numbers = gr.Markdown(elem_id="numbers")
                    reconstruction = _image("Reconstruction from this pose", "reconstruction", visible=False)
                with gr.Accordion("Change the pose, and see the reconstruction (networks with a decoder)", open=False):
                    poses = [
                        gr.Slider(
                            -1,
                            1,
                            0,
                            step=0.01,
                            label=f"Pose element {index + 1}",
                            visible=False,
                            elem_id=f"pose-{index}",
                        )
                        for index in range(SLIDERS)
                    ]
        toy = [category, instance, elevation, azimuth, lighting]
        inputs = [network, source, drawing, file, rule, iterations, epsilon, number, class_name, *toy]
        outputs = [message, picture, support, bars, pose, numbers, class_name, number, reconstruction, state, *poses]
        quick: dict[str, Any] = {"show_progress": "hidden", "trigger_mode": "always_last"}
        # Calls with the same identifier run one after the other, so an older result never replaces a newer one.
        result, redraw = ({**quick, "concurrency_id": name} for name in ("result", "pose"))
        in_url = [network, rule, iterations, epsilon, number, *toy]
        to_url = {"fn": None, "inputs": in_url, "js": TO_URL}
        for tab, name in ((draw_tab, "draw"), (file_tab, "file"), (toy_tab, "toy")):
            selected = tab.select(lambda name=name: name, None, source, **quick)
            selected.then(callbacks.show_best, inputs, outputs, **result)
        for new_image in (drawing.change, file.change, category.input, instance.input):
            new_image(callbacks.show_best, inputs, outputs, **result).then(**to_url)
        for changed in (rule, iterations, epsilon, elevation, azimuth, lighting):
            changed.input(callbacks.show, inputs, outputs, **result).then(**to_url)
        for changed in (class_name, number):
            changed.input(callbacks.show_support, [state, number, class_name], support, **result).then(**to_url)
        chosen = network.input(callbacks.choose, network, [rule, iterations, toy_tab, message], **quick)
        chosen.then(callbacks.show_best, inputs, outputs, **result).then(**to_url)
        for slider in poses:
            slider.input(callbacks.draw_pose, [state, *poses], reconstruction, **redraw)
        page.load(None, js=ON_LOAD)
        page.load(callbacks.from_url, None, [message, *in_url, toy_tab], show_progress="hidden")
    return page


def serve(explorer: Explorer, port: int, *, open_browser: bool = True) -> None:
    """Serve the page until the user interrupts the server.

    Raises:
        BadInput: the server cannot open the port, for example because another program uses it.
    """
    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"]), Middleware(SameOrigin)]
    with TemporaryDirectory() as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder  # uploads and pictures, deleted when the server ends
        try:
            build(explorer).launch(
                server_name="127.0.0.1",
                server_port=port,
                inbrowser=open_browser,
                share=False,
                quiet=True,
                ssr_mode=False,
                enable_monitoring=False,
                max_file_size="50mb",
                footer_links=[],
                theme=theme.set(body_text_color_subdued="*neutral_600"),
                css=CSS,
                app_kwargs={"middleware": middleware},
            )
        except OSError as error:
            raise BadInput(f"port {port} cannot be opened ({error}): choose another port with --port") from error
