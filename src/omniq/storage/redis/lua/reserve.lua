--[[
Who gets which task. Promotion of what is due, turns between groups and ungrouped tasks, leases.
]]

local promoted = {}
local ID = 22 -- the place of `id` in FIELDS

-- Tasks whose time has come join the tail of their lanes in the order of their times, ties in the order of insertion.
function machine.promote(q, limit)
  if promoted[q.name] then return 0 end
  promoted[q.name] = limit == PROMOTE_LIMIT
  store.flush()
  local found = call('ZRANGEBYSCORE', q.base .. 'delayed', '-inf', NOW, 'WITHSCORES', 'LIMIT', 0, limit)
  if #found == 0 then return 0 end
  local due = {}
  for i = 1, #found, 2 do
    local t = store.load(q, found[i])
    if t and t.state == 'delayed' and is_text(found[i]) then
      due[#due + 1] = {tonumber(found[i + 1]), t.seq, i, t}
    else
      call('ZREM', q.base .. 'delayed', found[i])
      call('ZREM', q.base .. 'idx:delayed', found[i])
      q.changed = true
      if not t or t.odd or t.state == 'delayed' then machine.unreadable(q, found[i]) end
    end
  end
  table.sort(due, function(a, b)
    if a[1] ~= b[1] then return a[1] < b[1] end
    if a[2] ~= b[2] then return a[2] < b[2] end
    return a[3] < b[3]
  end)
  for _, entry in ipairs(due) do
    lanes.move(entry[4], 'wait')
    set(entry[4], 'updated_ms', NOW)
  end
  return #due
end

-- Some client stored what nobody can run: it is put aside, and the others have their turn.
function machine.unreadable(q, id)
  machine.need('operations')
  machine.need('aside')
  machine.put_aside(q, id)
end

-- Leases a task that was popped from its lane and adds all its fields to the answer. Nil for an id without a waiting task: it
-- was removed by others, or pushed twice.
local function lease(q, id, op, tasks)
  local known = cache[slot(q, id)]
  local values = redis.pcall('HMGET', q.job .. id, unpack(PLAIN)) -- others may have stored something else there
  if values[1] ~= 'wait' or (known and known.state ~= 'wait') or not is_text(id) then
    if not MEMBER[values[1]] or values[1] == 'wait' and not is_text(id) then machine.unreadable(q, id) end
    remove(q, 'idx:wait', id) -- else it would count as ready for ever
    q.changed = true
    return nil
  end
  if machine.lease_plain(q, id, op, values) then
    tasks[#tasks + 1] = {q.name, values}
    return true
  end
  values = call('HMGET', q.job .. id, unpack(FIELDS))
  local t = store.shape(q, id, job_key(q, id), values)
  values[ID] = id -- whatever the hash says: under this name it is ended
  if t.foreign then store.adopt(t) end
  t.attempt = t.attempt + 1
  t.lease_token = op.token
  t.lock_until_ms = now + (op.lease or (t.timeout_ms > 0 and t.timeout_ms) or DEFAULT_LEASE_MS)
  if t.worker ~= text(op.worker) then
    t.worker = text(op.worker)
    set(t, 'worker', op.worker)
  end
  set(t, 'attempt', digits(t.attempt))
  set(t, 'lease_token', op.token)
  set(t, 'lock_until_ms', digits(t.lock_until_ms))
  if not t.first_started_ms then set(t, 'first_started_ms', NOW) end
  t.last_started_ms = NOW
  set(t, 'last_started_ms', NOW)
  set(t, 'updated_ms', NOW)
  lanes.take(t)
  log.note(t, 'started')
  local places = {}
  for i, field in ipairs(FIELDS) do places[field] = i end
  for i = 1, #t.changes, 2 do
    local place = places[t.changes[i]]
    if place then values[place] = t.changes[i + 1] end
  end
  tasks[#tasks + 1] = {q.name, values}
  return t
end

local function take_ungrouped(q, limit, op, tasks)
  local taken = 0
  while taken < limit do
    local ids = call('LPOP', q.base .. 'wait', limit - taken) -- some may turn out to be no tasks: then it takes more
    if not ids then break end
    for _, id in ipairs(ids) do
      if lease(q, id, op, tasks) then taken = taken + 1 end
    end
  end
  return taken
end

-- One task of the group that has been ready longest. Other clients look at limits and lanes only when they pop a group, and they
-- may have left one there that is full or empty.
local function take_grouped(q, op, tasks)
  while true do
    local gid = call('ZRANGE', q.base .. 'groups:ready', 0, 0)[1]
    if not gid then return 0 end
    local g = lanes.group(q, gid)
    q.lanes[gid] = true
    local id = g.inflight < math.max(g.limit, 1) and call('LPOP', g.base .. ':wait')
    if not id then -- full or empty: it comes back with its next release or task
      call('ZREM', q.base .. 'groups:ready', gid)
      g.ready = call('LLEN', g.base .. ':wait')
      g.open, g.was_open, g.score = false, false, nil
    else
      local t = lease(q, id, op, tasks)
      if not t then
        g.ready = math.max(g.ready - 1, 0)
        q.grouped = q.grouped - 1
        lanes.look(g)
      end
      lanes.write(g)
      if t then return 1 end
    end
  end
end

-- Queues that never had a group take many tasks by one command.
local function grant(q, limit, op, tasks)
  local stored = number(call('GET', q.base .. 'lane:rr')) -- flipped by each grant, as every client does: all share the turns
  local turn = stored == 0 and 0 or 1
  local before, taken = stored, 0
  if not lanes.grouped(q) then
    taken = take_ungrouped(q, limit, op, tasks)
    turn = (turn + taken) % 2
  else
    while taken < limit do
      local got
      if turn == 0 then got = take_grouped(q, op, tasks) else got = take_ungrouped(q, 1, op, tasks) end
      if got == 0 then
        if turn == 0 then got = take_ungrouped(q, 1, op, tasks) else got = take_grouped(q, op, tasks) end
      end
      if got == 0 then break end
      taken, turn = taken + 1, 1 - turn
    end
  end
  if turn ~= before then call('SET', q.base .. 'lane:rr', digits(turn)) end
  if taken > 0 then q.reserved = true end
  return taken
end

-- What a repeated call already holds under its token.
local function held_under(op)
  local tasks = {}
  for _, name in ipairs(op.queues) do
    local q = queue(name)
    for _, id in ipairs(call('ZRANGE', q.base .. 'active', 0, -1)) do
      if redis.pcall('HGET', job_key(q, id), 'lease_token') == op.token then
        tasks[#tasks + 1] = {name, call('HMGET', job_key(q, id), unpack(FIELDS))}
      end
    end
  end
  return tasks
end

function machine.reserve(op)
  store.flush()
  if request.again then
    local tasks = held_under(op)
    if #tasks > 0 then return {{}, -1, tasks, now} end
  end
  op.worker = op.worker or ''
  local tasks, paused, left, next_at = {}, {}, op.limit, -1
  for _, name in ipairs(op.queues) do
    local q = queue(name)
    if call('EXISTS', q.base .. 'paused') == 1 then
      paused[#paused + 1] = name
    elseif left > 0 then
      machine.promote(q, PROMOTE_LIMIT)
      store.flush()
      left = left - grant(q, left, op, tasks)
    end
  end
  store.flush()
  for _, name in ipairs(op.queues) do
    for _, set_name in ipairs({'delayed', 'active'}) do
      local first = call('ZRANGE', queue(name).base .. set_name, 0, 0, 'WITHSCORES')[2]
      if first and (next_at < 0 or tonumber(first) < next_at) then next_at = tonumber(first) end
    end
  end
  return {paused, next_at, tasks, now}
end
