# Two commands do everything: `make demo` and `make test`. Both make their own virtual environment first.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: help demo test house test-slow test-vllm data kv contexts seeds recall lookup bench-cpu ablate ablate-smoke soak gpu-check docs clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

# the stamp changes when what is to be installed does
$(VENV)/.installed: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $$($(PYTHON) --version) is too old, Python 3.11 or newer is needed: make PYTHON=python3.12 ..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed requirements-test.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements-test.txt
	@touch $@

demo: $(VENV)/.installed  ## train the default config on Shakespeare, sample from it, report its KV cache (3 to 6 minutes on 2 cores)
	$(BIN)/python train.py config/train_mqa_local.py
	$(BIN)/python sample.py config/train_mqa_local.py --num_samples=2 --max_new_tokens=255 --temperature=0.6

data: $(VENV)/.installed  ## fetch and prepare the Shakespeare data sets
	$(BIN)/python data/shakespeare_works/prepare.py
	$(BIN)/python data/shakespeare_bpe/prepare.py

test: $(VENV)/.installed-test  ## the tests, without the slow ones, one process for each core
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m 'not slow and not house' -n auto --dist worksteal

house: $(VENV)/.installed-test  ## the project's own rules: sizes of the core and of rooms, files and functions; order of rooms
	$(BIN)/python -m pytest -q tests/test_house.py

test-slow: data $(VENV)/.installed-test  ## the tests marked slow (prepares the data set)
	$(BIN)/python -m pytest -q -m slow

VLLM_VENV ?= .venv-vllm
$(VLLM_VENV)/.installed: lab/scripts/vllm_env.sh
	PYTHON=$(PYTHON) lab/scripts/vllm_env.sh $(VLLM_VENV)
	@touch $@

test-vllm: $(VLLM_VENV)/.installed  ## exported models in vLLM on a CPU, in an environment of its own (3 GB; some minutes)
	$(VLLM_VENV)/bin/python -m pytest -q tests/vllm

# grouped queries, five local layers to a global one, K = V and a quarter of RoPE in global layers, nothing shared
GEMMA = --n_kv_head=4 --kv_share= --share_global_kv=False --kv_tied=global --rope_fraction_global=0.25
kv: $(VENV)/.installed-test  ## the KV bytes of GPT-2's shape, numbers and the drawn plan, in README
	mkdir -p results/kv
	report() { $(BIN)/python -m kv config/train_gpt2_mqa_local.py --budget=1GB --json=True "$$@" | tail -n 1 \
	  | $(BIN)/python -m json.tool; }; \
	for T in 1024 8192; do \
	  report --max_seq_len=$$T > results/kv/gpt2_mqa_local-T$$T.json; \
	  report --max_seq_len=$$T $(GEMMA) > results/kv/gemma_shaped-T$$T.json; \
	done
	$(BIN)/python -m kv config/train_gpt2_mqa_local.py --svg=results/kv/plan.svg > /dev/null

held-out.txt: data
	$(BIN)/python -c "import numpy; from data.datasets import DATA_ROOT; \
	  from data.tokenfiles import read_meta; from data.tokenizer import load_tokenizer; \
	  folder = DATA_ROOT / 'shakespeare_works'; ids = numpy.fromfile(folder / 'val.bin', 'uint16'); \
	  print(load_tokenizer(read_meta(folder)).decode(ids.tolist()), end='')" > $@

contexts: held-out.txt  ## loss in contexts longer than those trained on (10 minutes on 2 cores)
	for run in mqa-local rope-mha; do test -f out-$$run/ckpt.pt || \
	  $(BIN)/python train.py config/train_$$(echo $$run | tr - _).py || exit; done
	for run in mqa-local rope-mha; do for T in 256 1024 4096 8192; do \
	  $(BIN)/python -m interop.evaluate --out_dir=out-$$run --text=held-out.txt --context=$$T \
	    --batch_size=1 --json | tail -n 1; done; done > results/demo/contexts.jsonl

SEEDS = $(foreach run,mqa_local rope_mha vanilla,$(foreach seed,1 2 3,$(run)-$(seed)))
out-seeds/%/bits.json: | held-out.txt
	OMP_NUM_THREADS=1 $(BIN)/python train.py config/train_$(firstword $(subst -, ,$*)).py \
	  --seed=$(lastword $(subst -, ,$*)) --out_dir=$(@D)
	$(BIN)/python -m interop.evaluate --out_dir=$(@D) --text=held-out.txt --json | tail -n 1 > $@.tmp
	mv $@.tmp $@
seeds: $(SEEDS:%=out-seeds/%/bits.json)  ## the demo and its two baselines with three seeds (make -j2 seeds: 20 minutes on 2 cores)
	cat $^ > results/demo/seeds.jsonl

recall: $(VENV)/.installed-test  ## the ladder's rows on a task that needs memory (an hour on 2 cores; finished runs are kept)
	$(BIN)/python ablate.py config/ablate_recall.py --jobs=2

lookup: $(VENV)/.installed-test  ## how many facts a cache holds for its bytes (two hours on 2 cores; finished runs are kept)
	$(BIN)/python ablate.py config/ablate_lookup.py --jobs=2

bench-cpu: $(VENV)/.installed-test  ## decoding, prefill and serving on this CPU (about an hour; finished runs are kept)
	PYTHON=$(BIN)/python lab/scripts/bench_cpu.sh

ablate-smoke: $(VENV)/.installed-test data  ## the ladder of tiny models, with its report (a minute or two on 2 cores)
	$(BIN)/python ablate.py config/ablate_smoke.py

ablate: $(VENV)/.installed-test data recall  ## from vanilla GPT-2 to the full stack, and recall (many hours on 2 cores; finished runs are kept)
	$(BIN)/python ablate.py config/ablate_prices.py --jobs=2

soak: $(VENV)/.installed-test  ## training killed 20 times at any moment, against training left alone (a few minutes on 2 cores)
	KILLS=20 $(BIN)/python -m pytest -q -s tests/training/test_soak.py

docs: $(VENV)/.installed  ## write the tables of results/ into README.md and docs/
	$(BIN)/python -m lab.pages

PART ?= smoke
gpu-check: $(VENV)/.installed-test  ## a part of the check of everything on a CUDA GPU: PART=smoke, exact, speed, tune, train, ...
	PYTHON=$(BIN)/python lab/scripts/gpu_check.sh --part=$(PART)

clean:  ## remove the environment and what training wrote
	rm -rf $(VENV) out-mqa-local
