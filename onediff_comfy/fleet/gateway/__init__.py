"""The address of a fleet: takes prompts as ComfyUI does, writes them down, and hands them to workers over HTTP."""
