# cmake -DPROGRAM=<program> -DWORK_DIR=<folder> -P plan_a_job.cmake
# plan_a_job answers what the README shows, writes whole reports and pictures, reads machines that were measured, and
# refuses bad input in one line with exit code 2, having written nothing.
cmake_minimum_required(VERSION 3.25)
file(REMOVE_RECURSE ${WORK_DIR})
file(MAKE_DIRECTORY ${WORK_DIR})


execute_process(
  COMMAND ${PROGRAM} --machine frontier --gpus 3072 --model gpt-1t --report ${WORK_DIR}/plan.json
    --picture ${WORK_DIR}/plan.svg
  OUTPUT_VARIABLE says COMMAND_ERROR_IS_FATAL ANY)
foreach(line IN ITEMS "gpt-1t on 3072 GPUs of frontier, 3072 sequences" "why the first, and not with" "does not fit: "
    "% time: tensor collectives" "compression is not searched" "what this rests on")
  string(FIND "${says}" "${line}" position)
  if(position EQUAL -1)
    message(FATAL_ERROR "plan_a_job does not say '${line}' but\n${says}")
  endif()
endforeach()
if(NOT says MATCHES "share of FLOPs in products +46 % +fitted\n" OR NOT says MATCHES "launch of a kernel +4 us +assumed\n")
  message(FATAL_ERROR "what Frontier's figures are is not said:\n${says}")
endif()
file(READ ${WORK_DIR}/plan.json report)
foreach(key IN ITEMS tp pp dp sp micro_batch micro_batches zero_stage schedule memory_gib_per_gpu seconds_per_step mfu hfu)
  string(JSON ${key} GET "${report}" ${key})
  string(JSON first GET "${report}" plans 0 ${key})
  if(NOT "${${key}}" STREQUAL "${first}")
    message(FATAL_ERROR "${key} of the report is ${${key}}, of its first plan ${first}")
  endif()
endforeach()
math(EXPR ranks "${tp} * ${pp} * ${dp} * ${sp}")
math(EXPR sequences "${dp} * ${micro_batch} * ${micro_batches}")
string(JSON limit GET "${report}" memory_limit_gib)
string(JSON alternatives LENGTH "${report}" alternatives)
if(NOT ranks EQUAL 3072 OR NOT sequences EQUAL 3072 OR NOT tp EQUAL 4 OR NOT sp EQUAL 2 OR memory_gib_per_gpu GREATER limit
    OR alternatives LESS 8 OR NOT mfu LESS hfu OR NOT hfu LESS 1)
  message(FATAL_ERROR "the report makes no sense:\n${report}")
endif()
file(READ ${WORK_DIR}/plan.svg picture)
if(NOT picture MATCHES "^<svg .*57\\.6 GiB may be used.*</svg>\n$")
  message(FATAL_ERROR "the picture is:\n${picture}")
endif()

# What was measured, here by the planner itself, gives back the machine; given jobs are priced, not searched for.
file(WRITE ${WORK_DIR}/jobs.json [[{"steps": [
  {"model": "gpt2-1558m", "dp": 4, "micro_batch": 8, "micro_batches": 4, "zero_stage": 1},
  {"model": "gpt2-1558m", "pp": 2, "dp": 2, "micro_batch": 4, "micro_batches": 8, "schedule": "gpipe"},
  {"model": "48,1600,25,50304,1024", "pp": 4, "micro_batch": 64, "micro_batches": 8, "recompute": "none"},
  {"model": "gpt-22b", "tp": 4, "micro_batch": 1},
  {"model": "gpt2-1558m", "micro_batch": 43, "trainer": "tutti"},
  {"model": "gpt2-1558m", "micro_batch": 43, "trainer": "tutti", "recompute": "stages"}]}]])
execute_process(COMMAND ${PROGRAM} --machine hgx-h200 --predict ${WORK_DIR}/jobs.json --report ${WORK_DIR}/times.json
  OUTPUT_VARIABLE says COMMAND_ERROR_IS_FATAL ANY)
file(READ ${WORK_DIR}/times.json times)
string(JSON machine GET "${times}" machine)
set(steps "")
foreach(i RANGE 5)
  string(JSON fits_${i} GET "${times}" steps ${i} fits)
  string(JSON seconds_${i} GET "${times}" steps ${i} seconds_per_step)
endforeach()
# Recomputed, the only stage is there whole while it runs again: it holds as much, and takes longer.
foreach(i IN ITEMS 4 5)
  string(JSON held_${i} GET "${times}" steps ${i} memory_gib_per_gpu)
endforeach()
if(NOT held_4 MATCHES "^131\\.5" OR NOT held_4 STREQUAL held_5 OR seconds_5 LESS_EQUAL seconds_4)
  message(FATAL_ERROR "the trainer's step holds ${held_4} GiB in ${seconds_4} s, recomputed ${held_5} in ${seconds_5}")
endif()
if(NOT fits_0 OR NOT fits_1 OR fits_2 OR NOT says MATCHES ", which does not fit")
  message(FATAL_ERROR "of four jobs the third alone does not fit:\n${says}")
endif()
file(WRITE ${WORK_DIR}/this.json "{\"name\": \"this machine\", \"like\": \"hgx-h200\", \"product_efficiency\": 0.6,
  \"inside\": {\"latency_seconds\": 5e-6, \"bytes_per_second\": 450e9}, \"processors\": 132, \"steps\": [
  {\"model\": \"gpt2-1558m\", \"dp\": 4, \"micro_batch\": 8, \"micro_batches\": 4, \"zero_stage\": 1, \"seconds\": ${seconds_0}},
  {\"model\": \"gpt2-1558m\", \"pp\": 2, \"dp\": 2, \"micro_batch\": 4, \"micro_batches\": 8, \"schedule\": \"gpipe\", \"seconds\": ${seconds_1}},
  {\"model\": \"gpt-22b\", \"tp\": 4, \"micro_batch\": 1, \"seconds\": ${seconds_3}}]}")
execute_process(COMMAND ${PROGRAM} --machine ${WORK_DIR}/this.json --gpus 4 --model gpt2-1558m --batch 64
    --zero 1 2 --schedule 1f1b --tp 1 --recompute selective --report ${WORK_DIR}/this_plan.json
  OUTPUT_VARIABLE says COMMAND_ERROR_IS_FATAL ANY)
file(READ ${WORK_DIR}/this_plan.json report)
foreach(key IN ITEMS product_efficiency memory_efficiency link_efficiency)
  string(JSON fitted GET "${report}" machine ${key})
  string(JSON truth GET "${machine}" ${key})
  if(NOT fitted STREQUAL truth)
    message(FATAL_ERROR "${key} is ${truth}, and from steps ${fitted}")
  endif()
endforeach()
string(JSON name GET "${report}" machine name)
if(NOT says MATCHES "share of FLOPs in products +[0-9.]+ % +fitted\nshare of memory bandwidth +[0-9.]+ % +fitted\n"
    OR NOT says MATCHES "FLOPs +989 TFLOP/s +published\n" OR NOT says MATCHES "results of a product at once +[0-9]+ +given\n")
  message(FATAL_ERROR "what is measured and what is given is not told apart:\n${says}")
endif()
string(JSON evidence GET "${report}" machine figures 0 evidence)
if(NOT evidence STREQUAL "published")
  message(FATAL_ERROR "the report's first figure is ${evidence}")
endif()
# Nodes of other sizes than those of the published machine are nobody's but the user's.
file(WRITE ${WORK_DIR}/half.json [[{"like": "dgx-a100", "ranks_per_node": 4}]])
execute_process(COMMAND ${PROGRAM} --machine ${WORK_DIR}/half.json --gpus 4 --model gpt2-124m
  OUTPUT_VARIABLE half COMMAND_ERROR_IS_FATAL ANY)
if(NOT half MATCHES "300 GB/s inside nodes of 4, 25 between +given\n")
  message(FATAL_ERROR "whose nodes of 4 are is not said:\n${half}")
endif()
if(NOT name STREQUAL "this machine" OR NOT says MATCHES "on 4 GPUs of this machine")
  message(FATAL_ERROR "the machine is called '${name}'")
endif()

# What this project's trainer does not run is not planned for it: other chunks than two, shards of a node.
foreach(job IN ITEMS "hgx-h200 --gpus 32 --model gpt-175b --batch 512"
    "hgx-h100 --gpus 16 --model gpt2-1558m --batch 64 --zero 3 --sp 1")
  separate_arguments(job UNIX_COMMAND "--machine ${job}")
  foreach(trainer IN ITEMS megatron tutti)
    execute_process(COMMAND ${PROGRAM} ${job} --trainer ${trainer} OUTPUT_VARIABLE says COMMAND_ERROR_IS_FATAL ANY)
    if(says MATCHES "interleaved x ([3-9]|1[0-9])|_shards of" AND trainer STREQUAL "tutti")
      message(FATAL_ERROR "the trainer does not run '${CMAKE_MATCH_0}':\n${says}")
    elseif(NOT says MATCHES "interleaved x ([3-9]|1[0-9])|_shards of" AND trainer STREQUAL "megatron")
      message(FATAL_ERROR "others run more, but\n${says}")
    elseif(trainer STREQUAL "tutti" AND NOT says MATCHES "recomputation +stages")
      message(FATAL_ERROR "stages are not recomputed:\n${says}")
    endif()
  endforeach()
endforeach()

# Bad input: arguments, then what the one line on stderr says.
file(WRITE ${WORK_DIR}/unknown.json [[{"like": "hgx-h200", "gpus": 3}]])
file(WRITE ${WORK_DIR}/wrong.json [[{"like": "hgx-h200", "flops": "many"}]])
file(WRITE ${WORK_DIR}/negative.json [[{"like": "hgx-h200", "flops": -1}]])
file(WRITE ${WORK_DIR}/bare.json [[{"flops": 1e15}]])
file(WRITE ${WORK_DIR}/broken.json "{")
file(WRITE ${WORK_DIR}/one_product.json [[{"like": "hgx-h200", "products": [{"m": 1, "n": 1, "k": 1, "seconds": 1}]}]])
file(WRITE ${WORK_DIR}/odd_job.json [[{"steps": [{"model": "gpt2-1558m", "tp": 32, "micro_batch": 1}]}]])
file(WRITE ${WORK_DIR}/odd_trainer.json [[{"steps": [{"model": "gpt2-1558m", "micro_batch": 1, "trainer": "mine"}]}]])
file(WRITE ${WORK_DIR}/too_good.json [[{"like": "hgx-h200", "link_efficiency": 1.5}]])
file(WRITE ${WORK_DIR}/less_than_none.json [[{"like": "hgx-h200", "processors": -132}]])
file(WRITE ${WORK_DIR}/half_a_rank.json [[{"steps": [{"model": "gpt2-1558m", "tp": 1.5, "micro_batch": 1}]}]])
file(WRITE ${WORK_DIR}/many_ranks.json [[{"steps": [{"model": "gpt2-1558m", "dp": 4294967297, "micro_batch": 1}]}]])
file(WRITE ${WORK_DIR}/no_jobs.json [[{"steps": []}]])
function(expect_refusal text)
  file(REMOVE ${WORK_DIR}/none.json)
  execute_process(COMMAND ${PROGRAM} ${ARGN} --report ${WORK_DIR}/none.json
    OUTPUT_VARIABLE out ERROR_VARIABLE err RESULT_VARIABLE code)
  string(FIND "${err}" "${text}" position)
  if(NOT code EQUAL 2 OR position EQUAL -1 OR NOT err MATCHES "^plan_a_job: [^\n]*\n$" OR NOT out STREQUAL ""
      OR EXISTS ${WORK_DIR}/none.json)
    message(FATAL_ERROR "'${ARGN}' ends with ${code}; expected 2 and '${text}', and one line:\n${err}")
  endif()
endfunction()
set(asked --gpus 8 --model gpt2-124m)
expect_refusal("--gpus is missing" --model gpt-1t)
expect_refusal("--model is missing" --gpus 8)
expect_refusal("'cray' is not a machine; there are frontier, dgx-a100" --machine cray ${asked})
expect_refusal("'gpt' is not a model; there are gpt2-124m" --gpus 8 --model gpt)
expect_refusal("is neither a model's name nor LAYERS,HIDDEN" --gpus 8 --model 1,2,3)
expect_refusal("is neither a model's name nor LAYERS,HIDDEN" --gpus 8 --model 12,768,12,50304,1024,7)
expect_refusal("hidden 770 does not divide over 12 heads" --gpus 8 --model 12,770,12,50304,1024)
expect_refusal("--gpus: Value 0 not in range 1 to 16777216" --gpus 0 --model gpt-1t)
expect_refusal("--gpus" --gpus many --model gpt-1t)
expect_refusal("--speed" ${asked} --speed 3)
expect_refusal("no layout divides 3072 ranks" --gpus 3072 --model gpt-1t --batch 1000 --sp 1)
expect_refusal("and 8 sequences, with tensor ranks of 5, 7, with stages of 2\n" ${asked} --tp 5 7 --pp 2)
# Numbers that would overflow, or take years to divide.
expect_refusal("--batch: Value 9223372036854775807 not in range 1 to " ${asked} --batch 9223372036854775807)
expect_refusal("a model of more parameters than can be counted" --gpus 8 --model 1000000000,1000000000,1,1000,1000)
expect_refusal("a batch of more numbers than can be counted" --gpus 1 --model 1,1000000,1,1,1000000000 --batch 1000000)
expect_refusal("compression inf; at least 1, and finite" ${asked} --allow-compression inf)
expect_refusal("nothing fits: even tp 32 pp 2 dp 1 takes " --gpus 64 --model gpt-1t)
expect_refusal("nothing fits: even tp 32 pp 1 dp 1 sp 2 with zero<3> takes " --gpus 64 --model gpt-1t --pp 1)
expect_refusal("no layout can have a schedule of those allowed: its micro-batches are too few, odd or do not divide"
  --machine hgx-h200 --gpus 2 --model gpt2-1558m --pp 2 --schedule dual_pipe --batch 3)
expect_refusal("--schedule: '2f2b' is not one of gpipe, 1f1b" ${asked} --schedule 2f2b)
expect_refusal("--trainer: 'mine' is not one of megatron, tutti" ${asked} --trainer mine)
expect_refusal("this library's trainer recomputes selective or stages" ${asked} --trainer tutti --recompute full)
expect_refusal("steps[0]: 'mine' is not one of megatron, tutti" --predict ${WORK_DIR}/odd_trainer.json)
expect_refusal("--trainer and --predict exclude each other" --trainer tutti --predict ${WORK_DIR}/jobs.json)
expect_refusal("--recompute: 'some' is not one of none, selective, full, stages" ${asked} --recompute some)
expect_refusal("--allow-delayed needs --allow-tau" ${asked} --allow-delayed)
expect_refusal("a search has each ZeRO stage once" ${asked} --zero 1 1)
expect_refusal("a search has each compression once" ${asked} --allow-compression 4 4)
expect_refusal("compression 0.5; at least 1" ${asked} --allow-compression 0.5)
foreach(margin IN ITEMS 5 1 -0.1 nan)
  expect_refusal("--margin: ${margin} is not a share, of 0 to below 1" ${asked} --margin ${margin})
  expect_refusal("--margin: ${margin} is not a share, of 0 to below 1" --predict ${WORK_DIR}/jobs.json --margin ${margin})
endforeach()
expect_refusal("--report and --picture name the same file '${WORK_DIR}/none.json'" ${asked}
  --picture ${WORK_DIR}/none.json)
file(WRITE ${WORK_DIR}/before.json [[{"steps": [{"model": "gpt2-1558m", "micro_batch": 1, "seconds": -5}]}]])
expect_refusal("steps[0]: a step of -5 seconds" --predict ${WORK_DIR}/before.json)
expect_refusal("cannot read '${WORK_DIR}/missing.json'" ${asked} --machine ${WORK_DIR}/missing.json)
expect_refusal("'gpus' is not known" ${asked} --machine ${WORK_DIR}/unknown.json)
expect_refusal("'flops' is \"many\", which is not a number" ${asked} --machine ${WORK_DIR}/wrong.json)
expect_refusal("'flops' is -1; it must be positive" ${asked} --machine ${WORK_DIR}/negative.json)
expect_refusal("'link_efficiency' is 1.5; it is a share of the peak" ${asked} --machine ${WORK_DIR}/too_good.json)
expect_refusal("-132 processors" ${asked} --machine ${WORK_DIR}/less_than_none.json)
expect_refusal("steps[0]: 'tp' is 1.5, which is not a whole number" --predict ${WORK_DIR}/half_a_rank.json)
expect_refusal("steps[0]: 'dp' is 4294967297, which is not a whole number of this size"
  --predict ${WORK_DIR}/many_ranks.json)
expect_refusal("neither 'memory_bytes' nor 'like'" ${asked} --machine ${WORK_DIR}/bare.json)
file(WRITE ${WORK_DIR}/links.json [[{"name": "lab", "flops": 1e14, "memory_bytes": 8e10, "memory_bandwidth": 1e12,
  "ranks_per_node": 8, "inside": {"bytes_per_second": 1e11}, "between": {}}]])
expect_refusal("machine 'lab': between.bytes_per_second is inf" ${asked} --machine ${WORK_DIR}/links.json)
expect_refusal("parse error" ${asked} --machine ${WORK_DIR}/broken.json)
file(WRITE ${WORK_DIR}/less_than_a_row.json [[{"like": "hgx-h200", "products": [
  {"m": -1, "n": 1, "k": 1, "seconds": 1}, {"m": 2, "n": 1, "k": 1, "seconds": 2}]}]])
file(WRITE ${WORK_DIR}/fewer_bytes.json [[{"like": "hgx-h200", "collectives": [
  {"kind": "all_reduce", "ranks": 2, "bytes": -5, "seconds": 1}]}]])
expect_refusal("a product of -1 x 1 and 1 x 1" ${asked} --machine ${WORK_DIR}/less_than_a_row.json)
expect_refusal("a collective of -5 bytes of 2 ranks" ${asked} --machine ${WORK_DIR}/fewer_bytes.json)
expect_refusal("measurements of one size" ${asked} --machine ${WORK_DIR}/one_product.json)
expect_refusal("steps[0]: plan: 25 heads do not divide over 32 ranks" --predict ${WORK_DIR}/odd_job.json)
file(WRITE ${WORK_DIR}/many_chunks.json [[{"steps": [
  {"model": "gpt2-124m", "micro_batch": 1, "pp": 65536, "chunks": 65536, "schedule": "interleaved"}]}]])
expect_refusal("12 layers do not divide over 65536 stages of 65536 chunks" --predict ${WORK_DIR}/many_chunks.json)
expect_refusal("no 'steps'" --predict ${WORK_DIR}/no_jobs.json)
expect_refusal("--gpus and --predict exclude each other" --gpus 8 --predict ${WORK_DIR}/jobs.json)
expect_refusal("--tp and --predict exclude each other" --tp 2 --predict ${WORK_DIR}/jobs.json)
expect_refusal("--kept-scores and --predict exclude each other" --kept-scores --predict ${WORK_DIR}/jobs.json)

# What changes training is in the plan where it is allowed, and pays.
file(WRITE ${WORK_DIR}/slow.json [[{"like": "hgx-h100", "ranks_per_node": 1, "between": {"latency_seconds": 1e-3, "bytes_per_second": 1e8}}]])
execute_process(COMMAND ${PROGRAM} --machine ${WORK_DIR}/slow.json ${asked} --batch 128 --allow-tau 8 32 --allow-delayed
    --allow-compression 8 --report ${WORK_DIR}/slow_plan.json
  OUTPUT_VARIABLE says COMMAND_ERROR_IS_FATAL ANY)
file(READ ${WORK_DIR}/slow_plan.json report)
string(JSON tau GET "${report}" tau)
string(JSON strategy GET "${report}" strategy)
if(NOT tau EQUAL 32 OR NOT strategy MATCHES "^co2 of 32 steps over local" OR says MATCHES "is not searched")
  message(FATAL_ERROR "over a slow network the plan is ${strategy}:\n${says}")
endif()
message(STATUS "tp ${tp} pp ${pp} dp ${dp}, ${seconds_per_step} s; ${strategy}")
