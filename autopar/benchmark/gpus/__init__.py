"""What ``make gpus`` runs on several GPUs of one machine: programs against one device, links, steps, a failure.

``__main__`` starts a torchrun job for each part and writes the page, ``ranks`` is what the ranks of such a job do, ``cases`` says
which plans are trained.
"""
