"""What is trained is what is served: the training modules against diffusers, transformers and the painter."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import numpy as np
import torch
import torch._dynamo.testing
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from safetensors.torch import load_file
from transformers import Qwen2_5_VLTextConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

from omni_grpc.config import BUNDLED
from omni_grpc.models.qwen_image.pipeline_text_to_image import PREFIX, SUFFIX
from omni_grpc.scenes.captions import known_words, say
from omni_grpc.scenes.layout import arrange, paint
from omni_grpc.scenes.wish import draw_wish
from tools.train_demo import autoencoder, denoiser, loop, pool, render, run
from tools.train_demo.export import export
from tools.train_demo.ranks import ALIGNED, Flat
from tools.train_demo.unpack import unpack
from tools.train_demo.words import PREFIX_TOKENS, template, tokenizer

ROOT = Path(__file__).resolve().parents[2]


def test_the_transformer_is_that_of_diffusers() -> None:
    torch.manual_seed(0)
    mine = denoiser.Transformer()
    for parameter in mine.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.05)
    theirs = QwenImageTransformer2DModel(
        num_layers=denoiser.LAYERS,
        attention_head_dim=denoiser.HEAD,
        num_attention_heads=denoiser.HEADS,
        joint_attention_dim=denoiser.TEXT_CHANNELS,
        axes_dims_rope=denoiser.AXES,
    )
    theirs.load_state_dict(mine.state_dict())
    x, text, t = torch.randn(2, 6, 64), torch.randn(2, 9, denoiser.TEXT_CHANNELS), torch.tensor([0.3, 0.9])
    with torch.inference_mode():
        got = mine(x, t, text, denoiser.rope(9, 2, 3), torch.ones(2, 1, 1, 15, dtype=torch.bool))
        wanted = theirs(x, encoder_hidden_states=text, timestep=t, img_shapes=[[(1, 2, 3)]] * 2, return_dict=False)[0]
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


def test_the_text_encoder_is_that_of_transformers() -> None:
    torch.manual_seed(0)
    words = tokenizer()
    mine = denoiser.TextEncoder(len(words))
    special = {name: words.convert_tokens_to_ids(name) for name in ("<|endoftext|>", "<|im_end|>")}
    theirs = Qwen2_5_VLTextModel(Qwen2_5_VLTextConfig(**denoiser.text_config(len(words), special))).eval()
    theirs.load_state_dict(mine.state_dict())
    ids = torch.tensor([words(template("a red circle left of a blue square")).input_ids])
    with torch.inference_mode():
        wanted = theirs(ids).last_hidden_state[:, PREFIX_TOKENS:]
        torch.testing.assert_close(mine(ids), wanted, rtol=0, atol=1e-5)


def test_compiled_layers_train_as_others_do_and_each_kind_is_compiled_once() -> None:
    torch.manual_seed(0)
    model = loop.Model(100)
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.05)
    batch = (torch.randn(2, 6, 64), torch.tensor([0.3, 0.9]), torch.randint(100, (2, PREFIX_TOKENS + 9)))

    def gradients() -> list[torch.Tensor]:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        model(*batch, torch.tensor([4, 9]), denoiser.rope(9, 2, 3)).square().mean().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    wanted = gradients()
    torch._dynamo.reset()
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    with loop.compiled_layers(model, graphs):
        got = gradients()
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-7)
    assert graphs.frame_count == 2
    gradients()
    assert graphs.frame_count == 2
    assert all(gradient.any() for gradient in wanted[:20])


def test_one_frame_goes_through_the_flat_autoencoder_as_through_the_deep_one() -> None:
    torch.manual_seed(0)
    vae = AutoencoderKLQwenImage(**autoencoder.CONFIG).eval()
    pixels = torch.randn(1, 3, 1, 32, 48)
    with torch.inference_mode():
        wanted = vae.encode(pixels).latent_dist.mean
        decoded = vae.decode(wanted).sample
        autoencoder.flat(vae)
        got = vae.quant_conv(vae.encoder(pixels)).chunk(2, 1)[0]
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
        again = vae.decoder(vae.post_quant_conv(got)).clamp(-1, 1)
        torch.testing.assert_close(again, decoded, rtol=0, atol=1e-4)


def test_scenes_are_rendered_as_they_are_painted() -> None:
    rng = random.Random(3)
    for _ in range(12):
        scene = arrange(draw_wish(rng), 96, 64, rng)
        things, ground = (torch.from_numpy(array)[None] for array in pool.numbers(scene))
        rendered = ((render.render(things, ground, 96, 64)[0].permute(1, 2, 0) + 1) * 127.5).round().numpy()
        assert np.abs(rendered - paint(scene).astype(float)).max() <= 2


def test_the_tokenizer_is_the_same_each_time_and_every_word_is_one_token() -> None:
    words = tokenizer()
    assert words.get_vocab() == tokenizer().get_vocab()
    assert len(words(PREFIX).input_ids) == PREFIX_TOKENS
    assert template("a star") == PREFIX + "a star" + SUFFIX
    for word in filter(str.isalpha, known_words()):
        assert len(words.tokenize(f" {word}")) == len(words.tokenize(word.capitalize())) == 1
    assert words.decode(words("an unheard-of word").input_ids) == "an unheard-of word"


def test_pools_are_the_same_for_any_number_of_processes_and_hold_nothing_out() -> None:
    def digest(processes: int) -> str:
        made = pool.make((128, 128), 60, 5, processes)
        arrays = (made.tokens, made.lengths, made.things, made.ground)
        return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()

    assert digest(1) == digest(2)
    rng = random.Random(0)
    assert not any(pool.training_wish(rng).held_out for _ in range(300))
    words = tokenizer()
    assert all(pool.encode(words, say(draw_wish(rng), rng)) is not None for _ in range(300))


def test_parameters_are_views_of_one_tensor_that_the_optimiser_steps() -> None:
    torch.manual_seed(0)
    plain, module = (torch.nn.Linear(3, 5) for _ in range(2))
    module.load_state_dict(plain.state_dict())
    flat = Flat(module.parameters())
    x = torch.randn(7, 3)
    for model, parameters in ((plain, plain.parameters()), (module, [flat.value])):
        optimizer = torch.optim.AdamW(parameters, 0.1)
        model(x).pow(2).sum().backward()
        if model is module:
            flat.average_grad(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
    torch.testing.assert_close(module.weight, plain.weight)
    torch.testing.assert_close(module.bias, plain.bias)
    again = flat.join([parameter.detach() for parameter in module.parameters()])
    assert torch.equal(again, flat.value)
    assert all(
        parameter.data_ptr() % (4 * ALIGNED) == flat.value.data_ptr() % (4 * ALIGNED) for parameter in flat.parameters
    )


def test_pools_made_ahead_are_dealt_out_to_the_ranks(tmp_path: Path) -> None:
    made = [pool.make(size, 9, 5, 1) for size in pool.BUCKETS]
    pool.save(made, tmp_path)
    dealt = [pool.load(tmp_path, rank, 2) for rank in range(2)]
    for place, whole in enumerate(made):
        parts = [pools[place] for pools in dealt]
        assert [len(part.lengths) for part in parts] == [5, 4]
        for name in ("tokens", "lengths", "ground"):
            joined = np.empty_like(getattr(whole, name))
            for rank, part in enumerate(parts):
                joined[rank::2] = getattr(part, name)
            assert np.array_equal(joined, getattr(whole, name))
        assert np.abs(parts[0].things - whole.things[::2]).max() <= 2**-11


def test_the_checkpoint_is_a_state_to_go_on_from(tmp_path: Path) -> None:
    unpack(BUNDLED, ROOT / "tools" / "train_demo" / "record.json", tmp_path)
    assert export(tmp_path, tmp_path / "again").is_dir()
    for part in ("transformer/diffusion_pytorch_model", "text_encoder/model", "vae/diffusion_pytorch_model"):
        (mine, kept) = (load_file(folder / f"{part}.safetensors") for folder in (tmp_path / "again", BUNDLED))
        assert mine.keys() == kept.keys()
        assert all(torch.equal(mine[name], kept[name]) for name in kept)
    model, state = run._resume(tmp_path, len(tokenizer()), fresh=False)
    assert state is not None
    assert "m" not in state
    assert state["step"] == 76000
    assert torch.equal(
        model.transformer.img_in.weight.bfloat16(),
        load_file(tmp_path / "parameters.safetensors")["transformer.img_in.weight"],
    )
