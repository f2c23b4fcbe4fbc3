--[[
How a run ends, and what that means for those who wait for the task.
]]

local function give_up_lease(t)
  t.lease_token, t.lock_until_ms = nil, 0
  set(t, 'lease_token', '')
  set(t, 'lock_until_ms', '')
end

local function stamp(t)
  set(t, 'updated_ms', NOW)
end

local function set_due(t, due_ms)
  t.due_ms, t.moved = due_ms, true
  set(t, 'due_ms', digits(due_ms))
end

-- What an error leaves on the task: in words for every client, whole for ours.
function machine.set_error(t, failure, words)
  set(t, 'error', failure or '')
  set(t, 'last_error', words or '')
  set(t, 'last_error_ms', NOW)
end

local function place(t)
  lanes.move(t, t.due_ms > now and 'delayed' or 'wait')
  ready_queues[t.q.name] = true
end

local function put_back(t)
  give_up_lease(t)
  lanes.move(t, 'wait', true)
end

-- Whether a job goes with its entry in `completed`, once the contract has ended it. A task that Python enqueued does not: it has a
-- time of its own.
function machine.is_listed(t)
  return t.name == '*' or t.adopted or call('HGET', t.key, 'foreign') == '1'
end

-- The lease is over and the result kept. With `again` the same task runs once more: the caller places it.
function machine.finish(t, state, result, token, again)
  local q = t.q
  set(t, 'finished_ms', NOW)
  stamp(t)
  t.ended_by = token
  set(t, 'ended_by', token or '')
  if t.lease_token then give_up_lease(t) end -- both fields blank: another client takes any rest of them for a held slot
  local ttl_ms = t.ttl_ms or DEFAULT_TTL_MS
  local moves = state == 'failed' and not again and t.dead_queue
  local stays = state == 'failed' and not again and not moves
  if stays or ttl_ms > 0 then
    result.ends = not again and not moves
    store.save_result(t, CODE[state], result, stays, ttl_ms)
  end
  set(t, state .. '_ms', NOW)
  if moves then
    lanes.move(t, 'moving')
  elseif state == 'completed' and not again and ttl_ms == 0 then
    lanes.leave(t) -- no list ever shows it; the caller drops it
    if t.gid then lanes.look(lanes.group(q, t.gid)) end
    t.state = nil
  elseif not again then
    lanes.move(t, state)
    if state == 'completed' then q.completed[#q.completed + 1] = t.id end
    if state == 'failed' then q.failed[#q.failed + 1] = t.id end
  end
  ended_tasks[#ended_tasks + 1] = t.id
  return ttl_ms
end

-- A new task from what an enqueue says, in the queue's books but in no lane yet. What it says of a field counts: a task from another
-- store has had attempts.
function machine.make(op, seq, created, due, eta)
  local q = queue(op.queue)
  local t = {
    q = q, id = op.id, key = job_key(q, op.id), changes = append(store.new_fields(created), op.fields), warm = true, moved = false,
    foreign = false, attempt = 0, timeout_ms = op.lease, gid = op.group, created_ms = number(created), due_ms = due,
    lock_until_ms = 0, seq = seq, name = op.name, cancel = false, eta_us = eta, interval_us = op.interval_us, ttl_ms = op.ttl,
    dead_queue = op.dead_queue, left = 0, idempotency_key = op.key, fingerprint = op.fingerprint, touched = false, deps = false,
  }
  set(t, 'due_ms', digits(due))
  set(t, 'o', store.origin(created, digits(seq), op.ttl, op.name, op.fingerprint, op.options))
  if eta then set(t, 'eta_us', eta) end
  cache[slot(q, op.id)], whereabouts[op.id] = t, t
  q.enqueued = true
  return t
end

function machine.schedule_again(t, again_ms)
  t.attempt = 0
  set(t, 'attempt', '0')
  set_due(t, again_ms)
  t.eta_us = digits(again_ms) .. '000'
  set(t, 'eta_us', t.eta_us)
  lanes.move(t, 'delayed')
  ready_queues[t.q.name] = true
end

-- The last error that a task wrote, as JSON.
function machine.error_of(t)
  for i = #t.changes - 1, 1, -2 do
    if t.changes[i] == 'error' then return text(t.changes[i + 1]) end
  end
  return text(call('HGET', t.key, 'error'))
end

function machine.stop(t, token, failure)
  if t.state == 'blocked' then machine.forget_blockers(t) end
  local ttl_ms = machine.finish(t, 'cancelled', {error = failure}, token, nil)
  log.note(t, 'cancelled', failure and log.with(nil, 'error', log.brief(failure)) or nil)
  if ttl_ms == 0 then
    store.flush()
    store.drop(t)
  end
  if t.deps then machine.cascade({t}) end
end

-- Same id, ready in the dead queue as if new there. It leaves a sign, for who already named it as a blocker.
function machine.move_to_dead_queue(t, name)
  local old, q = t.q, queue(name)
  local limit = t.gid and lanes.group(old, t.gid).limit or 0
  store.flush()
  call('RENAME', t.key, job_key(q, t.id))
  call('ZREM', old.o .. 'tasks', t.id)
  call('SET', old.o .. 'moved:' .. t.id, name, 'PX', MOVED_MS)
  if call('EXISTS', old.o .. 'res:' .. t.id) == 1 then
    call('RENAME', old.o .. 'res:' .. t.id, q.o .. 'res:' .. t.id)
    call('ZREM', old.o .. 'results', t.id)
    call('ZADD', q.o .. 'results', digits(t.expires_ms), t.id)
  end
  cache[slot(old, t.id)] = false
  cache[slot(q, t.id)] = t
  t.q, t.key, t.state, t.stored = q, job_key(q, t.id), nil, nil
  t.attempt, t.left = 0, 0
  set(t, 'attempt', '0')
  set(t, 'left', '0')
  for _, field in ipairs({'dead_queue', 'eta_us', 'edges', 'blocked_by', 'ended_by'}) do clear(t, field) end
  set_due(t, now)
  if t.gid then
    lanes.mark_grouped(q, t.gid)
    local g = lanes.group(q, t.gid)
    if limit > 0 and g.limit <= 0 then lanes.set_limit(g, limit) end
  end
  lanes.move(t, 'wait')
end

-- -- dependents ------------------------------------------------------------------------------------

local function deps_key(q, id) return q.o .. 'deps:' .. id end
local function member(t) return t.q.name .. ' ' .. t.id end

local function split(entry)
  local name, id = string.match(entry, '^(%S+) (.*)$')
  return queue(name), id
end

function machine.block(blocker, t)
  call('ZADD', deps_key(blocker.q, blocker.id), digits(t.seq), member(t))
  if not blocker.deps then
    blocker.deps = true
    if blocker.state == 'staged' then store.save_staged(blocker) else set(blocker, 'deps', '1') end
  end
end

-- Whom a task waits for, as pairs of id and queue; nil if that cannot be read.
function machine.edges_of(t)
  local parsed, edges = pcall(cjson.decode, t.edges or '')
  if not parsed or type(edges) ~= 'table' then return nil end
  for _, edge in pairs(edges) do
    if type(edge) ~= 'table' or type(edge[1]) ~= 'string' or type(edge[2]) ~= 'string' then return nil end
  end
  return edges
end

function machine.forget_blockers(t)
  if not t.edges then return end
  for _, edge in ipairs(machine.edges_of(t) or {}) do call('ZREM', deps_key(queue(edge[2]), edge[1]), member(t)) end
  clear(t, 'edges')
end

-- Who still waits for this task; who does not any more is forgotten on the way.
local function dependents(q, id, limit)
  local found = {}
  for _, entry in ipairs(call('ZRANGE', deps_key(q, id), 0, limit - 1)) do
    local other, dependent = split(entry)
    local t = store.load(other, dependent)
    if t and t.state == 'blocked' then
      found[#found + 1] = t
    else
      call('ZREM', deps_key(q, id), entry)
    end
  end
  return found
end

function machine.let_go(q, id, t)
  call('ZREM', deps_key(q, id), member(t))
  t.left = t.left - 1
  set(t, 'left', digits(t.left))
  if t.left > 0 then return end
  clear(t, 'edges')
  set_due(t, math.max(t.eta_us and math.ceil(t.eta_us / 1000) or 0, now))
  stamp(t)
  place(t)
end

-- Frees at most `CASCADE_LIMIT` tasks; the rest is left to `sweep`.
function machine.free(q, id)
  local freed = dependents(q, id, CASCADE_LIMIT)
  for _, t in ipairs(freed) do machine.let_go(q, id, t) end
  if #freed == CASCADE_LIMIT then call('HSET', q.o .. 'deferred', id, '0') end
  return #freed
end

function machine.fail_behind(t, blocker_id)
  local message = 'task ' .. blocker_id .. ', which this one waits for, failed or was cancelled'
  local failure = '{"type":"BlockerFailed","message":' .. cjson.encode(message) .. ',"traceback":""}'
  machine.set_error(t, failure, 'BlockerFailed: ' .. message)
  local to = t.dead_queue
  machine.finish(t, 'failed', {error = failure}, nil, nil)
  local data = log.with(nil, 'error', log.brief(failure))
  if to then data = log.with(data, 'to_queue', cjson.encode(to)) end
  log.note(t, 'failed', data, 'failed')
  if to then machine.move_to_dead_queue(t, to) end
end

-- Whatever waits for a dead task dies too, and so on.
function machine.cascade(dead)
  local budget, i = CASCADE_LIMIT, 1
  local places, fallen = {}, {}
  for _, t in ipairs(dead) do places[#places + 1] = {t.home or t.q, t.id} end
  while places[i] do
    local q, id = places[i][1], places[i][2]
    local behind = budget > 0 and dependents(q, id, budget) or {}
    for _, t in ipairs(behind) do
      machine.forget_blockers(t)
      fallen[#fallen + 1] = {t, id, #fallen}
      if t.deps then places[#places + 1] = {t.q, t.id} end
    end
    budget = budget - #behind
    if budget <= 0 then call('HSET', q.o .. 'deferred', id, '1') end
    i = i + 1
  end
  -- in the order in which they were enqueued, however they hang together
  table.sort(fallen, function(a, b)
    if a[1].seq ~= b[1].seq then return a[1].seq < b[1].seq end
    return a[3] < b[3]
  end)
  for _, fall in ipairs(fallen) do machine.fail_behind(fall[1], fall[2]) end
  return CASCADE_LIMIT - budget
end
