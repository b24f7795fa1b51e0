"""Tiny models of ComfyUI's model families, with random weights, as its own classes build them.

A family is one of the host's supported models with a configuration as its detection would find it in a
checkpoint, only smaller. Where the detection takes widths for granted (Qwen-Image is always 3072 wide)
a small checkpoint would not be recognised: such a family is ``detected=False`` and the host's class gets
the configuration from here; everything after detection is the host's own in either case.

    from tools.models.families import FAMILIES           # with ComfyUI importable, see below
    model = FAMILIES["wan"].load()              # a MODEL
    latent = FAMILIES["wan"].latent()           # zeros of a small size
    conditioning = FAMILIES["wan"].conditioning(seed=1)

Nothing of ComfyUI or torch is imported before something is built, so that names and properties of the
families can be listed without them. Whoever builds one has put ComfyUI on ``sys.path`` and chosen the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .checkpoints import random_weights
from .formats import FORMATS, checkpoint, scaled_fp8

if TYPE_CHECKING:
    import torch

    StateDict = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Family:
    """A tiny model and what to feed it.

    Attributes:
        supported: the name of its class in ``comfy.supported_models``.
        config: what the host's detection finds in a checkpoint of it, with small sizes.
        latent_channels: of its latents.
        tokens: how long its prompts are.
        width: of its text conditioning.
        pooled: width of its pooled text conditioning, 0 for none.
        cfg: guidance scale; with 1 there is one model call per step, else two or one of twice the batch.
        frames: of its latents, which then are ``[batch, channels, frames, height, width]``; None for images.
        batch: of its smallest latent.
        batches: whether a batch is a number of images, and not the frames of one video.
        side: height and width of its smallest latent; other sizes are multiples of ``step``.
        step: what sides must be multiples of.
        extras: further conditioning values: plain, or shapes (tuples of sizes) to be filled with noise; the
            size -1 stands for the number of tokens.
        masks: names and shapes of attention masks, of which all but the last two entries are 1.
        detected: whether the host recognises its weights without further help, as UNETLoader would.
        adjust: changes the random weights.
        weights: "fp8 cast" lets the host keep them in 8 bits and cast them layer by layer, as its loader node's
            weight_dtype does; "scaled fp8" is the older form of a checkpoint of 8-bit weights with their scales; or
            one of ``tools.models.formats.FORMATS``.
    """

    supported: str
    config: Mapping[str, Any]
    latent_channels: int
    width: int
    tokens: int = 16
    pooled: int = 0
    cfg: float = 4.0
    frames: int | None = None
    batch: int = 1
    batches: bool = True
    side: int = 8
    step: int = 2
    extras: Mapping[str, Any] = field(default_factory=dict)
    masks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    detected: bool = True
    adjust: Callable[[StateDict], None] | None = None
    weights: str = "float32"

    def build(self, seed: int = 1) -> StateDict:
        """The diffusion model's weights as a checkpoint has them, without a prefix."""
        import torch

        shapes = self._configuration().get_model({}, "", device=torch.device("meta")).diffusion_model.state_dict()
        weights = random_weights(shapes, "", "float32", seed=seed)
        if self.adjust is not None:
            self.adjust(weights)
        if self.weights in FORMATS:
            return checkpoint(weights, self.weights)
        return scaled_fp8(weights) if self.weights == "scaled fp8" else weights

    def load(self, seed: int = 1) -> Any:
        """A MODEL with these weights (a ModelPatcher), as the host's loaders make it.

        Raises:
            ValueError: the host does not recognise the weights, or not as this family.
        """
        import comfy.model_management
        import comfy.model_patcher
        import comfy.sd
        import comfy.utils
        import torch

        weights = self.build(seed)
        if self.detected:
            options = {"dtype": torch.float8_e4m3fn} if self.weights == "fp8 cast" else {}
            model = comfy.sd.load_diffusion_model_state_dict(weights, model_options=options)
            found = None if model is None else type(model.model.model_config).__name__
            if found != self.supported:
                raise ValueError(f"the host takes this checkpoint of {self.supported} for {found}")
            return model
        device = comfy.model_management.get_torch_device()
        offload = comfy.model_management.unet_offload_device()
        configuration = self._configuration()
        if self.weights in FORMATS:
            configuration.quant_config = comfy.utils.detect_layer_quantization(weights, "")
        module = configuration.get_model(weights, "", device=offload)
        patcher = comfy.model_patcher.CoreModelPatcher(module, load_device=device, offload_device=offload)
        module.load_model_weights(weights, "", assign=patcher.is_dynamic())
        return patcher

    def latent(
        self, batch: int | None = None, height: int | None = None, width: int | None = None, frames: int | None = None
    ) -> torch.Tensor:
        """Zeros, ``[batch, channels, (frames,) height, width]``, float32; sizes in latent pixels."""
        import torch

        between = () if self.frames is None else (frames or self.frames,)
        return torch.zeros(batch or self.batch, self.latent_channels, *between, height or self.side, width or self.side)

    def conditioning(self, seed: int, tokens: int | None = None) -> list[Any]:
        """Random conditioning in the host's form, on the CPU as text encoders leave it."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        length = tokens or self.tokens

        def sizes(shape: tuple[int, ...]) -> list[int]:
            return [length if size == -1 else size for size in shape]

        def noise(shape: tuple[int, ...]) -> torch.Tensor:
            return torch.randn(sizes(shape), generator=generator)

        values: dict[str, Any] = {name: noise(v) if isinstance(v, tuple) else v for name, v in self.extras.items()}
        for name, shape in self.masks.items():
            values[name] = torch.ones(sizes(shape), dtype=torch.long)
            values[name][..., -2:] = 0
        if self.pooled:
            values["pooled_output"] = noise((1, self.pooled))
        return [[noise((1, length, self.width)), values]]

    def _configuration(self) -> Any:
        import comfy.supported_models
        import torch

        configuration = getattr(comfy.supported_models, self.supported)(dict(self.config))
        configuration.set_inference_dtype(torch.float32, None)
        return configuration


_UNET: Mapping[str, Any] = {
    "image_size": 32,
    "use_checkpoint": False,
    "use_spatial_transformer": True,
    "legacy": False,
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 320,
    "adm_in_channels": None,
    "use_temporal_attention": False,
    "use_temporal_resblock": False,
}
# One resolution level with one transformer block.
_ONE_LEVEL: Mapping[str, Any] = {
    "channel_mult": [1],
    "num_res_blocks": [1],
    "transformer_depth": [1],
    "transformer_depth_output": [1, 0],
    "transformer_depth_middle": -2,
}
# Two resolution levels, with transformer blocks in both and in the middle.
_TWO_LEVELS: Mapping[str, Any] = {
    "channel_mult": [1, 2],
    "num_res_blocks": [1, 1],
    "transformer_depth": [1, 1],
    "transformer_depth_output": [1, 0, 1, 0],
    "transformer_depth_middle": 1,
}

_SD15 = Family(
    "SD15",
    {**_UNET, **_ONE_LEVEL, "context_dim": 768, "use_linear_in_transformer": False},
    latent_channels=4,
    width=768,
    tokens=77,
    cfg=7.0,
)


def _like_v_prediction(weights: StateDict) -> None:
    """SD2.1 is told from SD2.0 by how far this bias is spread."""
    name = "output_blocks.11.1.transformer_blocks.0.norm1.bias"
    weights[name] = weights[name] * 4


_SD2 = Family(
    "SD20",
    {
        **_UNET,
        "channel_mult": [1, 1, 1, 1],
        "num_res_blocks": [2, 2, 2, 2],
        "transformer_depth": [1, 0, 0, 0, 0, 0, 0, 0],
        "transformer_depth_output": [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        "transformer_depth_middle": -2,
        "context_dim": 1024,
        "use_linear_in_transformer": True,
    },
    latent_channels=4,
    width=1024,
    tokens=77,
    cfg=7.0,
    side=16,  # its deepest level must have more than one pixel
    step=8,
    adjust=_like_v_prediction,
)

_SDXL_MORE: Mapping[str, Any] = {"num_classes": "sequential", "use_linear_in_transformer": True}

_SDXL = Family(
    "KOALA_700M",
    {
        **_UNET,
        **_SDXL_MORE,
        "channel_mult": [1, 1, 1],
        "num_res_blocks": [1, 1, 1],
        "transformer_depth": [0, 2, 5],
        "transformer_depth_output": [0, 0, 1, 0, 1, 0],
        "transformer_depth_middle": -2,
        "adm_in_channels": 2816,
        "context_dim": 2048,
    },
    latent_channels=4,
    width=2048,
    tokens=77,
    pooled=1280,
    cfg=7.0,
    step=4,
)

_REFINER = Family(
    "SDXLRefiner",
    {**_UNET, **_SDXL_MORE, **_TWO_LEVELS, "model_channels": 64, "adm_in_channels": 2560, "context_dim": 1280},
    latent_channels=4,
    width=1280,
    tokens=77,
    pooled=1280,
    cfg=7.0,
    detected=False,  # its list of transformer depths is fixed, and means 130 M parameters
)

_SVD = Family(
    "SVD_img2vid",
    {
        **_UNET,
        **_SDXL_MORE,
        **_TWO_LEVELS,
        "model_channels": 64,
        "in_channels": 8,
        "adm_in_channels": 768,
        "context_dim": 1024,
        "use_temporal_attention": True,
        "use_temporal_resblock": True,
        "extra_ff_mix_layer": True,
        "merge_strategy": "learned_with_images",
        "merge_factor": 0.0,
        "video_kernel_size": [3, 1, 1],
        "disable_temporal_crossattention": False,
    },
    latent_channels=4,
    width=1024,
    tokens=1,  # one image embedding
    batch=4,
    batches=False,
    cfg=1.0,
    detected=False,  # as the refiner's
)

_SD3 = Family(
    "SD3",
    {
        "in_channels": 16,
        "patch_size": 2,
        "out_channels": 16,
        "depth": 2,  # also the number of heads of 64
        "input_size": None,
        "adm_in_channels": 64,
        "context_embedder_config": {
            "target": "torch.nn.Linear",
            "params": {"in_features": 64, "out_features": 128},
        },
        "num_patches": 32 * 32,
        "pos_embed_max_size": 32,
        "qk_norm": "rms",
        "pos_embed_scaling_factor": None,
        "x_block_self_attn_layers": [0],
    },
    latent_channels=16,
    width=64,
    pooled=64,
)

_AXES = [16, 56, 56]
_FLUX_CONFIG: Mapping[str, Any] = {
    "image_model": "flux",
    "in_channels": 16,
    "out_channels": 16,
    "patch_size": 2,
    "vec_in_dim": 32,
    "context_in_dim": 64,
    "hidden_size": 128,  # heads of 128
    "mlp_ratio": 4.0,
    "num_heads": 1,
    "depth": 1,
    "depth_single_blocks": 1,
    "axes_dim": _AXES,
    "theta": 10000,
    "txt_ids_dims": [],
    "qkv_bias": True,
    "guidance_embed": True,
}
_FLUX = Family("Flux", _FLUX_CONFIG, latent_channels=16, width=64, pooled=32, cfg=1.0, extras={"guidance": 3.5})

_FLUX2 = Family(
    "Flux2",
    {
        **_FLUX_CONFIG,
        "image_model": "flux2",
        "in_channels": 128,
        "out_channels": 128,
        "patch_size": 1,
        "vec_in_dim": None,
        "axes_dim": [32, 32, 32, 32],
        "mlp_ratio": 3.0,
        "theta": 2000,
        "global_modulation": True,
        "mlp_silu_act": True,
        "qkv_bias": False,
        "ops_bias": False,
        "default_ref_method": "index",
        "ref_index_scale": 10.0,
        "txt_ids_dims": [3],
        "yak_mlp": False,
        "txt_norm": False,
    },
    latent_channels=128,
    width=64,
    cfg=1.0,
    extras={"guidance": 4.0},
    step=1,
)

_CHROMA = Family(
    "Chroma",
    {
        **{name: value for name, value in _FLUX_CONFIG.items() if name != "guidance_embed"},
        "image_model": "chroma",
        "in_channels": 64,
        "out_channels": 64,
        "vec_in_dim": None,
        "in_dim": 64,
        "out_dim": 128,
        "hidden_dim": 64,
        "n_layers": 2,
    },
    latent_channels=16,
    width=64,
    detected=False,  # its guidance layer's widths are fixed
)

_QWEN = Family(
    "QwenImage",
    {
        "image_model": "qwen_image",
        "in_channels": 64,
        "num_layers": 2,
        "num_attention_heads": 1,
        "attention_head_dim": 128,
        "joint_attention_dim": 64,
    },
    latent_channels=16,
    width=64,
    frames=1,
    detected=False,
)

_LUMINA_CONFIG: Mapping[str, Any] = {
    "image_model": "lumina2",
    "patch_size": 2,
    "in_channels": 16,
    "cap_feat_dim": 64,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "qk_norm": True,
    "n_heads": 2,
    "n_kv_heads": 1,
    "dim": 192,
    "axes_dims": [32, 32, 32],
    "axes_lens": [300, 512, 512],
    "rope_theta": 10000.0,
    "ffn_dim_multiplier": 4.0,
}
# At cfg 1 the host makes one call of one batch; else free memory decides whether there are two.
_LUMINA2 = Family("Lumina2", _LUMINA_CONFIG, latent_channels=16, width=64, cfg=1.0, detected=False)

_Z_IMAGE = Family(
    "ZImage",
    {
        **_LUMINA_CONFIG,
        "n_heads": 2,
        "n_kv_heads": 2,
        "dim": 256,
        "axes_dims": [32, 48, 48],
        "axes_lens": [1536, 512, 512],
        "rope_theta": 256.0,
        "ffn_dim_multiplier": 8.0 / 3.0,
        "z_image_modulation": True,
        "time_scale": 1000.0,
        "pad_tokens_multiple": 32,
    },
    latent_channels=16,
    width=64,
    cfg=1.0,
    tokens=20,
    side=32,  # its images are padded to multiples of 32 patches: most real ones need none
    step=16,
    detected=False,
)

_WAN_CONFIG: Mapping[str, Any] = {
    "image_model": "wan2.1",
    "model_type": "t2v",
    "dim": 128,
    "out_dim": 16,
    "in_dim": 16,
    "num_heads": 1,
    "ffn_dim": 256,
    "num_layers": 2,
    "patch_size": (1, 2, 2),
    "freq_dim": 256,
    "window_size": (-1, -1),
    "qk_norm": True,
    "cross_attn_norm": True,
    "eps": 1e-6,
}
_WAN = Family("WAN21_T2V", _WAN_CONFIG, latent_channels=16, width=4096, frames=3)
_WAN22 = Family("WAN22_T2V", {**_WAN_CONFIG, "in_dim": 48, "out_dim": 48}, latent_channels=48, width=4096, frames=3)
_WAN_I2V = Family(
    "WAN21_I2V",
    {**_WAN_CONFIG, "model_type": "i2v", "in_dim": 36},
    latent_channels=16,
    width=4096,
    frames=3,
)

_LTXV = Family(
    "LTXV",
    {
        "image_model": "ltxv",
        "in_channels": 128,
        "num_layers": 2,
        "num_attention_heads": 2,
        "attention_head_dim": 64,
        "cross_attention_dim": 128,
        "caption_channels": 64,
    },
    latent_channels=128,
    width=64,
    frames=3,
    step=1,
    extras={"frame_rate": 25},
    masks={"attention_mask": (1, -1)},
    detected=False,  # 32 heads
)

_HUNYUAN_VIDEO = Family(
    "HunyuanVideo",
    {
        "image_model": "hunyuan_video",
        "in_channels": 16,
        "patch_size": [1, 2, 2],
        "out_channels": 16,
        "vec_in_dim": 768,
        "axes_dim": _AXES,
        "meanflow": False,
        "context_in_dim": 64,
        "hidden_size": 128,
        "mlp_ratio": 4.0,
        "num_heads": 1,
        "depth": 1,
        "depth_single_blocks": 1,
        "theta": 256,
        "qkv_bias": True,
        "byt5": False,
        "guidance_embed": True,
        "use_cond_type_embedding": False,
        "vision_in_dim": None,
        "meanflow_sum": False,
    },
    latent_channels=16,
    width=64,
    pooled=768,
    cfg=1.0,
    frames=3,
    extras={"guidance": 6.0},
)

_CASCADE_C = Family(
    "Stable_Cascade_C",
    {
        "stable_cascade_stage": "c",
        "c_cond": 64,
        "c_hidden": [64, 64],
        "nhead": [2, 2],
        "blocks": [[1, 1], [1, 1]],
        "c_clip_text": 64,
        "c_clip_text_pooled": 64,
    },
    latent_channels=16,
    width=64,
    tokens=77,
    pooled=64,
    detected=False,
)

_CASCADE_B = Family(
    "Stable_Cascade_B",
    {
        "stable_cascade_stage": "b",
        "c_cond": 64,
        "c_hidden": [32, 32, 64, 64],
        "nhead": [-1, -1, 2, 2],
        "blocks": [[1, 1, 1, 1], [1, 1, 1, 1]],
        "block_repeat": [[1, 1, 1, 1], [1, 1, 1, 1]],
        "c_clip": 64,
    },
    latent_channels=4,
    width=64,
    tokens=77,
    pooled=64,
    cfg=1.1,
    side=32,
    step=16,
    extras={"stable_cascade_prior": (1, 16, 6, 6)},
    detected=False,
)

_HIDREAM = Family(
    "HiDream",
    {
        "image_model": "hidream",
        "attention_head_dim": 128,
        "axes_dims_rope": [64, 32, 32],
        "caption_channels": [64, 64],
        "max_resolution": [128, 128],
        "in_channels": 16,
        "llama_layers": [0, 1],
        "num_attention_heads": 1,
        "num_routed_experts": 4,
        "num_activated_experts": 2,
        "num_layers": 1,
        "num_single_layers": 1,
        "out_channels": 16,
        "patch_size": 2,
        "text_emb_dim": 64,
    },
    latent_channels=16,
    width=64,
    pooled=64,
    extras={"conditioning_llama3": (1, 2, -1, 64)},
    cfg=1.0,
    detected=False,
)

_HYDIT = Family(
    "HunyuanDiT",
    {
        "image_model": "hydit",
        "depth": 2,
        "hidden_size": 128,
        "num_heads": 2,
        "text_states_dim": 64,
        "text_states_dim_t5": 32,
        "text_len": 16,
        "text_len_t5": 16,
    },
    latent_channels=4,
    width=64,
    extras={"conditioning_mt5xl": (1, 16, 32)},
    masks={"attention_mask": (1, -1), "attention_mask_mt5xl": (1, 16)},
    detected=False,
)

_PIXART = Family(
    "PixArtSigma",
    {
        "image_model": "pixart_sigma",
        "num_heads": 2,
        "patch_size": 2,
        "hidden_size": 64,
        "in_channels": 4,
        "depth": 2,
        "caption_channels": 64,
        "model_max_length": 300,
        "input_size": 32,
        "pe_interpolation": 1,
        "micro_condition": False,
    },
    latent_channels=4,
    width=64,
    side=48,  # its position embedding divides by size / 64, rounded
    detected=False,
)

_AURA = Family(
    "AuraFlow",
    {
        "cond_seq_dim": 64,
        "max_seq": 64 * 64,
        "n_double_layers": 1,
        "n_layers": 2,
        "dim": 128,
        "n_heads": 2,
        "global_conddim": 128,
    },
    latent_channels=4,
    width=64,
    detected=False,
)

_COSMOS_CONFIG: Mapping[str, Any] = {
    "max_img_h": 240,
    "max_img_w": 240,
    "max_frames": 128,
    "in_channels": 16,
    "out_channels": 16,
    "patch_spatial": 2,
    "patch_temporal": 1,
    "concat_padding_mask": True,
    "model_channels": 128,
    "num_blocks": 2,
    "num_heads": 1,
    "crossattn_emb_channels": 64,
    "pos_emb_cls": "rope3d",
    "pos_emb_interpolation": "crop",
    "use_adaln_lora": True,
    "adaln_lora_dim": 32,
    "rope_h_extrapolation_ratio": 1.0,
    "rope_w_extrapolation_ratio": 1.0,
    "rope_t_extrapolation_ratio": 2.0,
}
_COSMOS = Family(
    "CosmosT2V",
    {
        **_COSMOS_CONFIG,
        "image_model": "cosmos",
        "pos_emb_learnable": False,
        "block_config": "FA-CA-MLP",
        "block_x_format": "THWBD",
        "affline_emb_norm": True,
        "extra_per_block_abs_pos_emb": True,
        "extra_per_block_abs_pos_emb_type": "learnable",
    },
    latent_channels=16,
    width=64,
    frames=2,
    side=32,
    cfg=1.0,
    detected=False,
)
_COSMOS2 = Family(
    "CosmosT2IPredict2",
    {
        **_COSMOS_CONFIG,
        "image_model": "cosmos_predict2",
        "pos_emb_learnable": True,
        "min_fps": 1,
        "max_fps": 30,
        "extra_per_block_abs_pos_emb": False,
        "rope_enable_fps_modulation": False,
    },
    latent_channels=16,
    width=64,
    frames=1,
    side=32,
    cfg=1.0,
    detected=False,
)

_ERNIE = Family(
    "ErnieImage",
    {
        "image_model": "ernie",
        "hidden_size": 128,
        "num_attention_heads": 1,
        "num_layers": 2,
        "ffn_hidden_size": 256,
        "text_in_dim": 64,
    },
    latent_channels=128,
    width=64,
    cfg=1.0,
    step=1,
    detected=False,  # its sizes are the class's defaults
)

FAMILIES: Mapping[str, Family] = {
    "sd15": _SD15,
    "sd2": _SD2,
    "sdxl": _SDXL,
    "sdxl_refiner": _REFINER,
    "svd": _SVD,
    "sd3": _SD3,
    "flux": _FLUX,
    "flux2": _FLUX2,
    "chroma": _CHROMA,
    "qwen_image": _QWEN,
    "lumina2": _LUMINA2,
    "z_image": _Z_IMAGE,
    "wan21": _WAN,
    "wan21_i2v": _WAN_I2V,
    "wan22": _WAN22,
    "ltxv": _LTXV,
    "hunyuan_video": _HUNYUAN_VIDEO,
    "cascade_c": _CASCADE_C,
    "cascade_b": _CASCADE_B,
    "hidream": _HIDREAM,
    "hunyuan_dit": _HYDIT,
    "pixart": _PIXART,
    "aura_flow": _AURA,
    "cosmos": _COSMOS,
    "cosmos_predict2": _COSMOS2,
    "ernie_image": _ERNIE,
}
"""The families by name."""

_OF_FEW_BITS = ("flux", "wan21", "qwen_image", "sdxl", "ltxv")  # whose checkpoints people have in these forms

QUANTISED: Mapping[str, Family] = {
    "flux_fp8_cast": replace(_FLUX, weights="fp8 cast"),
    "flux_scaled_fp8": replace(_FLUX, weights="scaled fp8"),
    **{f"{name}_{form}": replace(FAMILIES[name], weights=form) for name in _OF_FEW_BITS for form in FORMATS},
}
"""Families with weights of fewer bits, by name."""

_NARROW_SDXL = replace(
    _SDXL,
    supported="SDXL",
    config={
        **_UNET,
        **_SDXL_MORE,
        **_TWO_LEVELS,
        "model_channels": 64,
        "adm_in_channels": 2816,
        "context_dim": 256,
    },
    width=256,
    detected=False,  # which goes by widths
)

NARROW: Mapping[str, Family] = {f"sdxl_{form}": replace(_NARROW_SDXL, weights=form) for form in FORMATS}
"""What stands for a family where products of 8 bits are computed as such: a CPU multiplies them number by number, and
those of a UNet that the host recognises take an hour."""
