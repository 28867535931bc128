"""vLLM with two weight slots: the only package that imports ``vllm``.

Roles, one per file: ``types`` (plain dataclasses, no vLLM), ``plugin`` (vLLM entry point),
``kernels`` (how one linear is prepared and run), ``layout`` (HF tensor names against vLLM's fused
modules, and the delivery check), ``slots`` (the quantization method and the slot bank), ``lanes``
(the scheduler), ``probe`` (scoring the idle slot), ``core`` (the slot state machine, one thread),
``thread`` (the engine thread), ``generator`` (the Forge actor).
"""
