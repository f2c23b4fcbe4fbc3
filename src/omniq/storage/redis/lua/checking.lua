--[[
Whether lanes, leases, indexes, slots of groups and counters of one queue agree with its tasks; `repair` sets them right.
]]

local function as_set(list)
  local found = {}
  for _, value in ipairs(list) do found[value] = true end
  return found
end

-- Compares an index with what it should hold: complaints, and with `repair` the index is set right.
local function compare(key, true_ids, complaints, repair)
  local there = as_set(call('ZRANGE', key, 0, -1))
  for id in pairs(true_ids) do
    if not there[id] then
      complaints[#complaints + 1] = key .. ' lacks ' .. id
      if repair then call('ZADD', key, NOW, id) end
    end
  end
  for id in pairs(there) do
    if not true_ids[id] then
      complaints[#complaints + 1] = key .. ' still has ' .. id
      if repair then call('ZREM', key, id) end
    end
  end
end

local function check_lane(q, gid, key, waiting, complaints, repair)
  for _, id in ipairs(call('LRANGE', key, 0, -1)) do
    local found = redis.pcall('HMGET', job_key(q, id), 'state', 'gid')
    if found[1] == 'wait' and text(found[2]) == gid and not waiting[id] then
      waiting[id] = true
    else
      complaints[#complaints + 1] = key .. ' has a stray entry ' .. id
      if repair then call('LREM', key, -1, id) end
    end
  end
end

-- The run settles the task once more, by the state that it is in; one without a run goes.
local function list_staged(q, id, run_id, value)
  local found = call('HMGET', q.o .. 'run:' .. run_id, 'state', 'expires')
  if not found[1] then
    store.drop_staged(store.shape_staged(q, id, value))
    return
  end
  call('RPUSH', q.o .. 'rows:' .. run_id, id)
  call('HSET', q.o .. 'run:' .. run_id, 'settled', '0')
  call('ZADD', q.o .. 'runs', found[1] == 'OPEN' and found[2] or '0', run_id)
  call('ZREM', q.o .. 'ended', run_id)
end

-- A staged task must be listed, and its run must come by it when it ends.
local function check_staged(q, complaints, repair)
  local rows = {}
  for _, id in ipairs(call('ZRANGE', q.o .. 'runs', 0, -1)) do rows[id] = as_set(call('LRANGE', q.o .. 'rows:' .. id, 0, -1)) end
  local staged = call('HGETALL', q.o .. 'staged')
  machine.need('staging')
  for i = 1, #staged, 2 do
    local id, row = staged[i], store.read_staged(staged[i + 1])
    local run_id = row.run_id
    if not call('ZSCORE', q.o .. 'tasks', id) then
      complaints[#complaints + 1] = q.o .. 'tasks lacks ' .. id
      if repair then call('ZADD', q.o .. 'tasks', row.seq, id) end
    end
    if not (rows[run_id] and rows[run_id][id]) then
      complaints[#complaints + 1] = 'run ' .. run_id .. ' does not know its task ' .. id
      if repair then list_staged(q, id, run_id, staged[i + 1]) end
    end
  end
  for _, id in ipairs(call('HKEYS', q.o .. 'claims')) do
    if call('HEXISTS', q.o .. 'staged', id) == 0 then
      complaints[#complaints + 1] = q.o .. 'claims still has ' .. id
      if repair then call('HDEL', q.o .. 'claims', id) end
    end
  end
end

-- A dead letter that was requeued or deleted, and a key that somebody deleted, is nobody's trouble any more.
local function is_settled(q, id)
  local state = redis.pcall('HGET', job_key(q, id), 'state')
  if is_text(id) and type(state) ~= 'table' then return state ~= 'failed' end
  return call('EXISTS', job_key(q, id)) == 0
end

local function check_corrupt(q, complaints)
  local entries = call('HGETALL', q.o .. 'corrupt')
  for i = 1, #entries, 2 do
    local id = entries[i]
    if is_settled(q, id) then
      call('HDEL', q.o .. 'corrupt', id)
    else
      complaints[#complaints + 1] = 'job ' .. id .. ' was put aside: ' .. string.match(entries[i + 1], '^%d+ (.*)$')
    end
  end
end

function upkeep.check(op)
  local q, complaints, repair = queue(op.queue), {}, op.repair
  local waiting, running, counts = {}, {}, {}
  local names = as_set(op.groups)
  for _, key in ipairs({q.o .. 'lanes', q.base .. 'groups:ready'}) do
    for _, gid in ipairs(call('ZRANGE', key, 0, -1)) do names[gid] = true end
  end
  for _, id in ipairs(call('ZRANGE', q.base .. 'idx:wait', 0, -1)) do
    local gid = machine.gid_of(q, id)
    if gid then names[gid] = true end
  end
  check_lane(q, nil, q.base .. 'wait', waiting, complaints, repair)
  for gid in pairs(names) do check_lane(q, gid, q.base .. 'g:' .. gid .. ':wait', waiting, complaints, repair) end
  for _, id in ipairs(call('ZRANGE', q.base .. 'active', 0, -1)) do
    local found = redis.pcall('HMGET', job_key(q, id), 'state', 'gid')
    if found[1] ~= 'active' then
      complaints[#complaints + 1] = 'the lease of ' .. id .. ' has no running task'
      if repair then call('ZREM', q.base .. 'active', id) end
    else
      running[id] = true
      local gid = text(found[2])
      if gid then counts[gid], names[gid] = (counts[gid] or 0) + 1, true end
    end
  end
  compare(q.base .. 'idx:wait', waiting, complaints, repair)
  compare(q.base .. 'idx:active', running, complaints, repair)
  compare(q.base .. 'idx:delayed', as_set(call('ZRANGE', q.base .. 'delayed', 0, -1)), complaints, repair)
  compare(q.base .. 'idx:failed', as_set(call('LRANGE', q.base .. 'failed', 0, -1)), complaints, repair)
  compare(q.base .. 'idx:completed', as_set(call('LRANGE', q.base .. 'completed', 0, -1)), complaints, repair)
  check_staged(q, complaints, repair)
  check_corrupt(q, complaints)
  local grouped, open = 0, 0
  for gid in pairs(names) do
    local g = lanes.group(q, gid)
    local right = counts[gid] or 0
    grouped = grouped + g.ready
    if g.inflight ~= right then
      complaints[#complaints + 1] = 'group ' .. gid .. ' counts ' .. g.inflight .. ' running tasks and has ' .. right
      g.inflight = right
    end
    local was = g.open
    lanes.look(g)
    if g.open then open = open + 1 end
    if was ~= g.open then complaints[#complaints + 1] = 'group ' .. gid .. (was and ' only seems' or ' fails') .. ' to be ready' end
    if repair then lanes.write(g) else g.changed, groups[q.name .. '\0' .. gid] = false, nil end
  end
  local ungrouped = call('LLEN', q.base .. 'wait')
  local right = {
    waiting = ungrouped, group_waiting = grouped, waiting_total = ungrouped + grouped,
    active = call('ZCARD', q.base .. 'active'), delayed = call('ZCARD', q.base .. 'delayed'),
    failed = call('LLEN', q.base .. 'failed'), completed_kept = call('LLEN', q.base .. 'completed'), groups_ready = open,
  }
  for field, value in pairs(right) do
    local counted = number(call('HGET', q.base .. 'stats', field))
    if counted ~= value then
      complaints[#complaints + 1] = 'stats counts ' .. counted .. ' ' .. field .. ' and there are ' .. value
      if repair then call('HSET', q.base .. 'stats', field, value) end
    end
  end
  return complaints
end
