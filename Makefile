# gemmfleet: `make help` lists the targets. Everything lands in .venv; nothing outside this folder is touched,
# except by SYSTEM=1, which may install Debian packages, and by test nodes, whose images are in ~/.cache/gemmfleet-tests.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON    ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3,$(if $(shell command -v $(p) 2>/dev/null),$(p))))
VENV      := .venv
BIN       := $(VENV)/bin
SHAPES    ?= examples/llm.csv
VARIABLES := SHAPES INVENTORY FAMILY TUNER DB RUN ARGS GOLDEN TOT SYSTEM FULL AITER_GIT PYTHON
TARGETS   := help setup tune bench plan status logs explain resume retry cancel runs nodes analyze report merge export verify compare demo wheel test lint format types unit planted soak system-packages shapes-named test-aiter benchmarks clean
.PHONY: $(TARGETS)

# a mistyped variable or target is an error: without this check `make tune SHAPE=my.csv` would tune the default shapes
PASSED  := VENV BIN KUBE_BIN PATH PIP_% PYTHON% GEMMFLEET_% %_VISIBLE_DEVICES MAKE% SHELL .SHELLFLAGS
unknown := $(filter-out $(VARIABLES) $(PASSED),$(foreach v,$(.VARIABLES),$(if $(filter command,$(origin $v)),$v)))
stray   := $(filter-out $(TARGETS) $(VENV)/%,$(MAKECMDGOALS))
closest  = $(shell $(or $(PYTHON),false) -c 'import difflib, sys; print(*difflib.get_close_matches(sys.argv[1].$(3)(), sys.argv[2:], 1, 0.5))' '$(subst ','\'',$(1))' $(2))
meant    = $(or $(addprefix did you mean ,$(addsuffix ?,$(closest))),$(4))
wants    = $(or $(if $(filter %.csv,$(1)),write SHAPES=$(1)),$(if $(filter %.yaml %.yml,$(1)),write INVENTORY=$(1)),$(if $(filter watch follow live json --%,$(1)),write ARGS=--$(1:--%=%)))
$(foreach v,$(unknown),$(warning unknown variable $v: $(call meant,$v,$(VARIABLES),upper,there are $(VARIABLES); write an environment variable before make)))
$(foreach g,$(stray),$(warning $g is not a target: $(or $(call wants,$g),$(call meant,$g,$(TARGETS),lower,make help lists them))))
$(if $(unknown)$(stray),$(error nothing was started))

# a local run needs torch here; a run on other nodes does not
LOCAL_EXTRA := $(if $(filter-out inventories/local.yaml,$(INVENTORY)),,$(if $(filter-out torch,$(TUNER)),,torch))
STAMP       := $(VENV)/.installed$(addprefix -,$(LOCAL_EXTRA))

help: ## list the targets
	@printf 'usage: make TARGET [SHAPES=llm.csv] [INVENTORY=inv.yaml] [FAMILY=a16w16] [TUNER=torch] [DB=tuned.csv] [RUN=id] [ARGS="..."]\n\n'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | while IFS=$$'\t' read -r name text; do printf '  %-12s %s\n' "$$name" "$$text"; done

# --- set-up ------------------------------------------------------------------------------------------------------

$(VENV)/bin/python:
	@[ -n "$(PYTHON)" ] || { echo "error: no python3 found; install Python 3.11 to 3.13"; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
	  || { echo "error: $$($(PYTHON) --version) will not do: Python 3.11 to 3.13 is needed (make PYTHON=/path/to/python3.11 ...)"; exit 2; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null \
	  || { echo "error: $(PYTHON) has no ensurepip; on Debian or Ubuntu: apt-get install python3-venv   (then run make again)"; exit 2; }
	@echo "setting up $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)

# a torch or Triton that imports is what the user measures with: it is kept, whatever constraints.txt says
define install
	@extras=; for extra in $(1); do \
	  case $$extra in torch|triton) if $(BIN)/python -c "import $$extra" 2>/dev/null; then continue; fi ;; esac; \
	  extras=$$extras$${extras:+,}$$extra; done; what="$${extras:+[$$extras]}"; \
	  echo "installing gemmfleet$$what into $(VENV) (once) ..."; \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".$$what"
	@touch $(VENV)/.installed $(addprefix $(VENV)/.installed-,$(1)) $@
endef

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(call install)

$(VENV)/.installed-torch: $(VENV)/bin/python pyproject.toml constraints.txt
	$(call install,torch)

$(VENV)/.installed-live: $(VENV)/bin/python pyproject.toml constraints.txt
	$(call install,live)

$(VENV)/.installed-dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(call install,torch triton live kubernetes dev)

setup: $(STAMP) ## set up .venv (the other targets do it by themselves)

# --- the product -------------------------------------------------------------------------------------------------

option = $(if $(2),$(1) '$(2)')

# one file, whose name may hold spaces, or several
lists = $(if $(shell [ ! -e '$(SHAPES)' ] || echo 1),'$(SHAPES)',$(foreach list,$(SHAPES),'$(list)'))

shapes-named:
	@[ -n '$(SHAPES)' ] || { echo "error: SHAPES= is empty: name a shapes file, as in  make tune SHAPES=examples/llm.csv"; exit 2; }

tune: shapes-named $(STAMP) ## tune SHAPES (default examples/llm.csv; one list or several) on INVENTORY (default this machine)
	@$(BIN)/gemmfleet tune $(lists) $(call option,-i,$(INVENTORY)) $(call option,--family,$(FAMILY)) $(call option,--tuner,$(TUNER)) $(call option,--db,$(DB)) $(ARGS)

bench: $(STAMP) ## measure backends on SHAPES (default: the FP4 suite) side by side; ARGS="--backend torch,aiter"
	@$(BIN)/gemmfleet bench $(if $(filter-out file,$(origin SHAPES)),'$(SHAPES)') $(call option,-i,$(INVENTORY)) $(call option,--family,$(FAMILY)) $(call option,--db,$(DB)) $(ARGS)

plan: shapes-named $(STAMP) ## show what tune would run where: asks the nodes of INVENTORY what they have, starts and writes nothing
	@$(MAKE) --no-print-directory tune ARGS='--plan $(ARGS)'

status logs explain resume retry cancel: $(STAMP)
	@$(BIN)/gemmfleet $@ $(RUN) $(ARGS)

status: ## how the latest run (or RUN=id) stands; ARGS="--watch" or "--json"
logs: ## merged log of the run's workers; ARGS="--follow"
explain: ## why a group waits, failed, moved or was split; RUN=id ARGS=g0001
resume: ## pick a run up after its controller died or was stopped
retry: ## queue the failed shapes of a run again
cancel: ## stop a run and leave no worker behind

analyze: $(STAMP) ## the best of each backend by shape of the latest run (or RUN=id, or ARGS="FOLDER --reference mi355x")
	@$(BIN)/gemmfleet analyze $(RUN) $(ARGS)

report: $(VENV)/.installed$(if $(findstring --live,$(ARGS)),-live) ## the page of the latest run (or RUN=id) as one file; ARGS="--open", or live: ARGS="--live --open"
	@$(BIN)/gemmfleet report $(RUN) $(ARGS)

# the run that RUN begins, or the latest
RUN_FOLDER = $(if $(RUN),$(firstword $(wildcard runs/$(RUN)*) $(RUN)),$$(dirname "$$(ls -t runs/*/run.yaml | head -n 1)"))

merge: $(VENV)/.installed ## merge the winners of the latest run (or RUN=id) into DB=tuned.csv
	@[ -n "$(DB)" ] || { echo "error: DB names no table: make merge DB=tuned.csv"; exit 2; }
	@$(BIN)/gemmfleet db merge "$(RUN_FOLDER)" --into '$(DB)' $(ARGS)

export: $(VENV)/.installed ## how AITER is made to use DB (or the latest run, or RUN=id); ARGS="--build TREE --gfx gfx950 --cu-num 256"
	@$(BIN)/gemmfleet db export $(if $(DB),'$(DB)',"$(RUN_FOLDER)") $(call option,-i,$(INVENTORY)) $(call option,--family,$(FAMILY)) $(ARGS)

verify: $(VENV)/.installed ## prove on its nodes that AITER uses the rows of the latest run (or RUN=id); INVENTORY and ARGS="--table t.csv"
	@$(BIN)/gemmfleet verify $(RUN) $(call option,-i,$(INVENTORY)) $(call option,--family,$(FAMILY)) $(ARGS)

compare: $(VENV)/.installed ## is TOT slower than GOLDEN: tables of times, folders of them or runs
	@$(BIN)/gemmfleet compare $(if $(GOLDEN),'$(GOLDEN)') $(if $(TOT),'$(TOT)') $(ARGS)

runs: $(STAMP) ## list the runs
	@$(BIN)/gemmfleet runs list $(ARGS)

nodes: $(STAMP) ## check the nodes of INVENTORY: reachable, docker, image, devices, disk, clock
	@$(BIN)/gemmfleet nodes check $(call option,-i,$(INVENTORY)) $(ARGS)

demo: system-packages $(VENV)/.installed ## try it on two nodes in containers of this machine, as root; SYSTEM=1 installs what they need
	@$(BIN)/python -m tests.integration.demo $(ARGS)

wheel: $(VENV)/bin/python ## build dist/gemmfleet-*.whl and .tar.gz, to install elsewhere with pip
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'hatchling>=1.25,<2'
	@rm -rf dist && $(BIN)/python -m hatchling build -d dist

# --- the project -------------------------------------------------------------------------------------------------

test: system-packages $(VENV)/.installed-dev ## lint, types and tests; FULL=1 adds the long ones, SYSTEM=1 may install system packages
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory -j 2 types unit

lint: $(VENV)/.installed-dev ## ruff
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(VENV)/.installed-dev ## let ruff format everything
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: $(VENV)/.installed-dev ## mypy strict
	@$(BIN)/mypy

# Tests of SYSTEM=1 wait for Docker and schedulers most of the time, so two more processes keep the cores busy. Modules
# are compiled while tests are collected, not anew by each of the many processes that tests start.
unit: $(VENV)/.installed-dev ## pytest in four processes, six with SYSTEM=1; ARGS="-n 0 tests/unit/planning/test_planning.py" for one and some
	@env -u PYTHONDONTWRITEBYTECODE SYSTEM='$(SYSTEM)' FULL='$(FULL)' $(BIN)/python -m pytest -n $(if $(SYSTEM),6,4) --dist loadgroup $(ARGS)

planted: $(VENV)/.installed-dev ## plant 40 bugs against the laws, each in a copy: the tests must catch them; ARGS="--only double-key"
	@$(BIN)/python -m tests.planted $(ARGS)

soak: system-packages $(VENV)/.installed-dev ## tests of minutes, and many more drawn plans and mixtures of faults
	@SOAK=1 SYSTEM=1 FULL=1 $(BIN)/python -m pytest -n 4 --dist loadgroup -m "soak or hypothesis or plans" $(ARGS)

test-aiter: $(VENV)/.installed-dev ## what we know of AITER against its real files: AITER_GIT=a clone of ROCm/aiter
	@[ -d "$(AITER_GIT)" ] || { echo "error: AITER_GIT names no folder: make test-aiter AITER_GIT=/path/to/a/clone/of/ROCm/aiter"; exit 2; }
	@AITER_GIT='$(abspath $(AITER_GIT))' $(BIN)/python -m pytest -n 3 --dist loadfile tests/aiter $(ARGS)

system-packages:
	@if [ -n "$(SYSTEM)" ]; then sh tests/system-packages.sh; fi

benchmarks: $(VENV)/.installed-dev ## measure speed; prints ratios against a bound or a peer
	@$(BIN)/python -m benchmarks $(ARGS)

clean: ## remove .venv and caches (runs/ stays)
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
