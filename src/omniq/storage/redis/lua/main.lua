--[[
One call: transactions in order, each all or nothing; then everything that they changed is written.
]]

function alone.reserve(op)
  return machine.reserve(op)
end

function alone.beat(op)
  if op.gone then
    call('HDEL', STORE .. 'workers', op.worker)
  else
    call('HSET', STORE .. 'workers', op.worker, NOW .. ' ' .. op.info)
  end
  return {}
end

-- The parts that most calls do without define their functions when they are asked for: in Lua that takes time.
local loaded = {}
local function need(part)
  if not loaded[part] then
    loaded[part] = true
    LOAD[part]()
  end
end

machine.need = need

local ALONE = {
  reserve = true, beat = true, openfanin = 'fan_in', countfanin = 'fan_in', openrun = 'staging', stage = 'staging',
  commitrun = 'staging', abortrun = 'staging',
}
local UPKEEP = {
  promote = 'sweeping', limit = 'sweeping', bury = 'sweeping', sweep = 'sweeping', purge = 'purging', forget = 'purging',
  check = 'checking', restore = 'restore', restore_events = 'restore',
}

function machine.transaction(ops)
  local first = ops[1]
  if alike[first.kind] then return alike[first.kind](first) end
  if UPKEEP[first.kind] then
    need('books')
    need('operations')
    need('aside')
    need(UPKEEP[first.kind])
    return {upkeep[first.kind](first)}
  end
  if ALONE[first.kind] then
    if ALONE[first.kind] == 'staging' then need('books') end
    if ALONE[first.kind] ~= true then need(ALONE[first.kind]) end
    local answer, refused, detail = alone[first.kind](first)
    if refused then return {refused, 1, detail} end
    return {answer}
  end
  need('operations')
  machine.stands_for = {} -- ids that this transaction did not use, to the tasks that were there already
  local found, bodies = {}, {}
  for i, op in ipairs(ops) do
    local known = check[op.kind](op)
    if known and known.refused then
      local kind, of, more = unpack(known.refused)
      if not (request.again and kind == 'NotActive') then return {kind, i, of, more} end
      known = {outcome = {'before'}} -- it was carried out, and its answer got lost
    end
    if op.kind == 'enqueue' and op.key then
      local place = op.queue .. '\0' .. op.key
      bodies[place] = bodies[place] or op.fingerprint
      if bodies[place] ~= op.fingerprint then return {'IdempotencyConflict', i} end
    end
    found[i] = known or false
  end
  local answers = {}
  for i, op in ipairs(ops) do
    local known = found[i]
    if known and known.outcome then
      answers[i] = known.outcome
      if op.kind == 'enqueue' then machine.stands_for[op.id] = known.outcome[1] end
    else
      if known and not known.gone then store.adopt(known) end
      answers[i] = write[op.kind](op, known or nil)
    end
  end
  return answers
end

local function write_stats(q)
  local stats, base = q.base .. 'stats', q.base
  local ungrouped = call('LLEN', base .. 'wait')
  local grouped = math.max(number(call('HGET', stats, 'group_waiting')) + q.grouped, 0)
  local moment = NOW
  local values = {
    'waiting', ungrouped, 'group_waiting', grouped, 'waiting_total', ungrouped + grouped,
    'active', call('ZCARD', base .. 'active'), 'delayed', call('ZCARD', base .. 'delayed'),
    'failed', call('LLEN', base .. 'failed'), 'completed_kept', call('LLEN', base .. 'completed'),
    'groups_ready', call('ZCARD', base .. 'groups:ready'), 'last_activity_ms', moment,
  }
  for field, happened in pairs({last_enqueue_ms = q.enqueued, last_reserve_ms = q.reserved, last_finish_ms = q.finished}) do
    if happened then
      values[#values + 1] = field
      values[#values + 1] = moment
    end
  end
  -- other clients find queues by this hash; nine new fields and more: it was not there
  local is_new = call('HSET', stats, unpack(values)) > 8
  if is_new and not request.cluster then call('SADD', STORE .. 'queues', q.name) end
end

local function write_queue(q)
  local names = {}
  for gid in pairs(q.lanes) do
    names[#names + 1] = '0'
    names[#names + 1] = gid
  end
  if #names > 0 then in_parts('ZADD', q.o .. 'lanes', names) end
  if q.changed then write_stats(q) end
  log.write(q)
  if q.changed_meta then
    call('HSET', q.o .. 'meta', 'seq', digits(q.seq), 'events', digits(q.last_event), 'turn', string.format('%.17g', q.turn))
  end
end

-- A hint for those who wait: the queues that may have work now, and the tasks that ended.
local function tell()
  local names = {}
  for name in pairs(ready_queues) do names[#names + 1] = name end
  if #names == 0 and #ended_tasks == 0 then return names end
  local many = #ended_tasks > 1000 -- a message goes to all processes: then it only says that they should look
  call('PUBLISH', STORE .. 'wake', cmsgpack.pack({names, many and {} or ended_tasks, many}))
  return names
end

-- A server that is full refuses the first write of a script if that needs memory, and none that comes after another write. So a
-- call that ends or extends what is there begins with one that changes nothing.
if request.full then call('DEL', KEYS[1]) end

local ids = 0 -- that this call will look up
for _, ops in ipairs(request.transactions) do
  for _, op in ipairs(ops) do
    if op.kind == 'enqueue' then
      ids = ids + 1 + (op.blocked_by and #op.blocked_by or 0)
    elseif op.kind == 'enqueues' then
      ids = ids + #op.rows / 3
    elseif op.kind == 'restore' then
      ids = ids + #op.tasks
    end
  end
end
if ids > 0 then need('books') end
-- Three keys per id and queue; from `LOOKUPS` on, the books of all queues are asked first, and once.
if ids > 1 and not request.cluster and 3 * ids * #store.all_bases() > LOOKUPS then
  need('many')
  store.foresee()
end
local answers = {}
for i, ops in ipairs(request.transactions) do
  if i > 1 and spent > BUDGET then break end -- the caller sends the others anew; one at least, or it would never end
  answers[i] = machine.transaction(ops)
end
store.flush()
for _, q in pairs(queues) do write_queue(q) end
return {answers, tell(), ended_tasks, now}
