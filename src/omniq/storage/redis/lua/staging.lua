--[[
Staged runs: tasks come in unseen, and are there all at once when their run is committed, or not at all.

  base:o:staged          hash    id: a task, packed; see `store.read_staged`
  base:o:claims          hash    id: further runs that staged the task too, as a msgpack list
  base:o:run:<run>       hash    state opened expires ended key_ttl new claimed released dropped settled; times in ms
  base:o:rows:<run>      list    ids of the tasks that the run staged or claims, in order; some may be gone
  base:o:runs            zset    runs that are not settled; score: when an open one is aborted, 0 of one that has ended
  base:o:ended           zset    settled runs; score: when they may be forgotten

A staged task has no job hash and is in no lane, so nothing that other clients do reaches it. If one of them publishes its id,
that job stands, and the staged task goes.
]]

local SETTLE_LIMIT = 500
local KEEP_MS = 86400000
local COUNTS = {'new', 'claimed', 'released', 'dropped'}

-- -- staged tasks ----------------------------------------------------------------------------------

-- What `staged` keeps of a task: "seq staged_ms deps run_bytes shape_bytes ", then as the caller packed it what it shares with
-- others and `{fingerprint, key or false, payload}`, at last the run. A shape of no bytes: what an enqueue says, whole.
function store.read_staged(value)
  local seq, staged_ms, deps, n, shape, at = string.match(value, '^(%d+) (%d+) (%d) (%d+) (%d+) ()')
  local row = {value = value, seq = seq, staged_ms = staged_ms, deps = deps == '1', at = at + shape - 1}
  if shape ~= '0' then row.shape = string.sub(value, at, row.at) end
  row.run_id = string.sub(value, -n)
  return row
end

-- A staged task, which has no hash: whoever finds it may only drop it, or wait for it.
function store.shape_staged(q, id, value)
  local row = store.read_staged(value)
  local _, op = cmsgpack.unpack_one(value, row.at)
  local t = {
    q = q, id = id, changes = {}, warm = true, state = 'staged', stored = 'staged', touched = false, moved = false, foreign = false,
    seq = number(row.seq), row = row, deps = row.deps, run_id = row.run_id, attempt = 0, created_ms = number(row.staged_ms),
    due_ms = number(row.staged_ms), lock_until_ms = 0, timeout_ms = 0, cancel = false, left = 0,
    fingerprint = row.shape and op[1] or op.fingerprint, idempotency_key = row.shape and op[2] or op.key or nil,
  }
  cache[slot(q, id)], whereabouts[id] = t, t
  return t
end

function store.save_staged(t)
  local row = t.row
  local packed = string.sub(row.value, #row.seq + #row.staged_ms + #TEXT[#row.run_id] + 6, -#row.run_id - 1)
  row.value = row.seq .. ' ' .. row.staged_ms .. (t.deps and ' 1 ' or ' 0 ') .. TEXT[#t.run_id] .. ' ' .. packed .. t.run_id
  row.run_id = t.run_id
  call('HSET', t.q.o .. 'staged', t.id, row.value)
end

-- A staged task goes as if it had never come; its dependents are the caller's.
function store.drop_staged(t)
  local q = t.q
  call('HDEL', q.o .. 'staged', t.id)
  call('HDEL', q.o .. 'claims', t.id)
  call('ZREM', q.o .. 'tasks', t.id)
  if t.idempotency_key then
    local key = store.key(q, t.idempotency_key)
    if key and key.id == t.id then store.delete_key(q, t.idempotency_key) end
  end
  t.gone, q.staging = true, nil
  cache[slot(q, t.id)] = false
end

-- -- runs ------------------------------------------------------------------------------------------

local function load_run(q, id)
  local key = q.o .. 'run:' .. id
  local v = call('HMGET', key, 'state', 'opened', 'expires', 'ended', 'key_ttl', 'settled', unpack(COUNTS))
  if not v[1] then return nil end
  local r = {
    q = q, id = id, key = key, state = v[1], opened = number(v[2]), expires = number(v[3]), ended = number(v[4]),
    key_ttl = number(v[5]), settled = v[6] == '1',
  }
  for i, name in ipairs(COUNTS) do r[name] = number(v[6 + i]) end
  return r
end

local function save_run(r)
  local values = {
    'state', r.state, 'opened', digits(r.opened), 'expires', digits(r.expires), 'ended', digits(r.ended), 'key_ttl',
    digits(r.key_ttl), 'settled', r.settled and '1' or '0',
  }
  for _, name in ipairs(COUNTS) do
    values[#values + 1] = name
    values[#values + 1] = digits(r[name])
  end
  call('HSET', r.key, unpack(values))
end

local function info(r)
  return {r.state, r.opened, r.expires, r.ended, r.new, r.claimed, r.released, r.dropped, r.settled and 1 or 0}
end

-- Why nothing more can be staged.
local function closed(r)
  if not r then return 'unknown' end
  if r.state ~= 'OPEN' then return r.state end
  if r.expires <= now then return 'late' end
  return nil
end

function alone.openrun(op)
  local q = queue(op.queue)
  local r = load_run(q, op.run)
  if r then
    local reason = closed(r)
    if reason then return nil, 'RunClosed', reason end
    return info(r)
  end
  r = {
    q = q, id = op.run, key = q.o .. 'run:' .. op.run, state = 'OPEN', opened = now, expires = now + op.ttl, ended = 0, key_ttl = 0,
    settled = false, new = 0, claimed = 0, released = 0, dropped = 0,
  }
  save_run(r)
  call('ZADD', q.o .. 'runs', digits(r.expires), r.id)
  q.changed = true
  return info(r)
end

-- -- staging ---------------------------------------------------------------------------------------

-- Whether no key of these is known or comes twice.
local function keys_free(q, keys)
  local names, seen = {}, {}
  for _, key in ipairs(keys) do
    if seen[key] then return false end
    seen[key] = true
    names[#names + 1] = q.o .. 'key:' .. key
  end
  for i = 1, #names, PART do
    if call('EXISTS', unpack(names, i, math.min(i + PART - 1, #names))) > 0 then return false end
  end
  return true
end

-- The task that is there already, by key or by id: staged, or the fingerprint of a visible one.
local function there(q, id, key)
  local known = key and store.key(q, key)
  if known then
    local first = store.find(q, known.id)
    if first and first.state == 'staged' then return first end
    if known.expires_ms > now or (first and not FINAL[first.state]) then return nil, known.fingerprint end
  end
  local t = store.find(q, id)
  if not t then return nil, store.occupied[slot(q, id)] and '' end
  if t.state == 'staged' then return t end
  return nil, t.fingerprint
end

local function claims_of(q, id)
  local found = call('HGET', q.o .. 'claims', id)
  return found and cmsgpack.unpack(found) or {}
end

local function save_claims(q, id, runs_of_it)
  if #runs_of_it > 0 then
    call('HSET', q.o .. 'claims', id, cmsgpack.pack(runs_of_it))
  else
    call('HDEL', q.o .. 'claims', id)
  end
end

local function claim(r, t)
  if t.run_id == r.id then return end
  local others = claims_of(r.q, t.id)
  for _, other in ipairs(others) do
    if other == r.id then return end
  end
  others[#others + 1] = r.id
  save_claims(r.q, t.id, others)
  call('RPUSH', r.q.o .. 'rows:' .. r.id, t.id)
  r.claimed = r.claimed + 1
end

-- `rows`: id, key or false, how long the key lives, fingerprint and packed task of each. Checks everything, then writes.
function alone.stage(op)
  local q, rows = queue(op.queue), op.rows
  local r = load_run(q, op.run)
  local reason = closed(r)
  if reason then return nil, 'RunClosed', reason end
  local ids, keys, found, limits = {}, {}, {}, {}
  for i = 1, #rows, 5 do
    ids[#ids + 1] = rows[i]
    if rows[i + 1] then keys[#keys + 1] = rows[i + 1] end
  end
  if not (store.all_new(q, ids) and keys_free(q, keys)) then
    for i = 1, #rows, 5 do
      local staged, fingerprint = there(q, rows[i], rows[i + 1])
      if staged and staged.q ~= q then return nil, 'DuplicateId', (i + 4) / 5 end
      found[i] = staged or fingerprint
      if op.strict and found[i] and (staged and staged.fingerprint or fingerprint) ~= rows[i + 3] then
        return nil, 'IdempotencyConflict', (i + 4) / 5
      end
    end
  end
  for _, limit in ipairs(op.limits or {}) do limits[limit[1]] = limit end
  local middle = ' ' .. NOW .. ' 0 ' .. TEXT[#r.id] .. ' '
  local staged, tasks, named, expiring, new, mine = {}, {}, {}, {}, {}, {}
  local seen_before = next(cache) ~= nil
  for i = 1, #rows, 5 do
    local id, key = rows[i], rows[i + 1]
    local before = found[i]
    if type(before) == 'table' then
      claim(r, before)
    elseif not before and not mine[id] and not (key and mine['\0' .. key]) then
      local seq, n = digits(next_seq(q)), #staged
      staged[n + 1], staged[n + 2] = id, seq .. middle .. rows[i + 4] .. r.id
      tasks[n + 1], tasks[n + 2] = seq, id
      new[#new + 1], mine[id] = id, true
      if seen_before then cache[slot(q, id)] = nil end
      if whereabouts[id] == false then whereabouts[id] = nil end
      if key then
        local k, until_ms = #named, now + rows[i + 2]
        named[k + 1], named[k + 2] = q.o .. 'key:' .. key, cmsgpack.pack({id, rows[i + 3], until_ms})
        expiring[k + 1], expiring[k + 2] = TEXT[until_ms], key
        mine['\0' .. key] = true
        r.key_ttl = math.max(r.key_ttl, rows[i + 2])
      end
      local limit = limits[(i + 4) / 5]
      if limit then
        local g = lanes.group(q, limit[2])
        if g.limit <= 0 then lanes.set_limit(g, limit[3]) else lanes.look(g) end
      end
    end
  end
  in_parts('HSET', q.o .. 'staged', staged)
  in_parts('ZADD', q.o .. 'tasks', tasks)
  in_parts('RPUSH', q.o .. 'rows:' .. r.id, new)
  for i = 1, #named, PART do call('MSET', unpack(named, i, math.min(i + PART - 1, #named))) end
  in_parts('ZADD', q.o .. 'keys', expiring)
  if #new > 0 then q.staging = true end
  r.new = r.new + #new
  save_run(r)
  return {#new, #ids - #new}
end

-- -- settling --------------------------------------------------------------------------------------

-- The options of a task, with the run that it came from.
local function options_of(r, options)
  return log.with(options, 'run', cjson.encode(r.id))
end

local shapes = {}

-- What tasks of one shape share of their hash; its first values are each task's own.
local function shape_of(r, packed)
  local shape = shapes[packed]
  if not shape then
    local name, fields, options, ttl_ms, is_empty = unpack(cmsgpack.unpack(packed))
    local values = append({'', 'id', '', 'payload', '', 'o', ''}, append(store.new_fields(r.moment), fields))
    shape = {
      name = name, ttl_ms = ttl_ms or nil, is_empty = is_empty, options = options_of(r, options), values = values, n = #values,
    }
    shapes[packed] = shape
  end
  return shape
end

-- A ready task without group, time and the like, in one command of its own.
local function release_plain(r, id, row)
  local q, shape, _, own = r.q, shape_of(r, row.shape), cmsgpack.unpack_one(row.value, row.at)
  local values, n, key, payload = shape.values, shape.n, own[2], own[3]
  values[1], values[3], values[5] = q.job .. id, id, payload
  values[7] = store.origin(r.moment, row.seq, shape.ttl_ms, shape.name, own[1], shape.options)
  if key then
    values[n + 1], values[n + 2], values[n + 3], values[n + 4] = 'idempotency_key', key, 'more', '1'
    n = n + 4
  end
  if row.deps then
    values[n + 1], values[n + 2] = 'deps', '1'
    n = n + 2
  end
  call('HSET', unpack(values, 1, n))
  lanes.push(q.base .. 'wait', id)
  add(q, 'idx:wait', NOW, id)
  q.ahead[id] = true
  if request.events then
    local data = '{"payload_bytes":' .. TEXT[shape.is_empty and 0 or #payload] .. '}'
    log.add(q, 'enqueued', id, shape.name, false, 0, false, r.ended, r.ended, CODE.wait, data)
  end
end

local function release(r, row)
  machine.need('operations')
  local q, _, op = r.q, cmsgpack.unpack_one(row.value, row.at)
  local due, eta = math.max(op.eta or 0, r.ended), op.eta_us
  if op.interval_us and (not op.eta or op.eta < due) then eta = digits(due) .. '000' end
  op.options = options_of(r, op.options)
  local t = machine.make(op, number(row.seq), r.moment, due, eta)
  if row.deps then
    t.deps = true
    set(t, 'deps', '1')
  end
  if t.gid then lanes.mark_grouped(q, t.gid) end
  lanes.move(t, due > now and 'delayed' or 'wait')
  log.note(t, 'enqueued', op.data)
end

local function release_all(r, rows)
  local q = r.q
  machine.promote(q, PROMOTE_LIMIT)
  local ids, seen_before = {}, next(cache) ~= nil
  for i, row in ipairs(rows) do
    ids[i] = row.id
    if seen_before then cache[slot(q, row.id)] = nil end
    if row.shape then release_plain(r, row.id, row) else release(r, row) end
  end
  in_parts('HDEL', q.o .. 'staged', ids)
  in_parts('HDEL', q.o .. 'claims', ids)
  r.released = r.released + #rows
  q.enqueued, q.changed, ready_queues[q.name] = true, true, true
end

-- The run lets go of a task: it is dropped, unless another run wants it too.
local function disclaim(r, row)
  local q, others = r.q, claims_of(r.q, row.id)
  if row.run_id ~= r.id then
    for i = #others, 1, -1 do
      if others[i] == r.id then table.remove(others, i) end
    end
    save_claims(q, row.id, others)
    return
  end
  local t = store.shape_staged(q, row.id, row.value)
  if #others == 0 then
    store.drop_staged(t)
    r.dropped = r.dropped + 1
    if t.deps then
      machine.need('operations')
      machine.cascade({t})
    end
    return
  end
  t.run_id = table.remove(others, 1)
  save_claims(q, row.id, others)
  store.save_staged(t)
end

-- Another client published the id: that job stands.
local function give_way(q, row)
  call('HDEL', q.o .. 'staged', row.id)
  call('HDEL', q.o .. 'claims', row.id)
  if row.deps then call('HSET', q.job .. row.id, 'deps', '1') end
  cache[slot(q, row.id)] = nil
end

-- Of these ids, those that are staged and that the run holds or claims, in the order in which they were staged.
local function rows_of(r, ids)
  local q, rows, seen, published, in_order = r.q, {}, {}, {}, true
  local values = call('HMGET', q.o .. 'staged', unpack(ids))
  local claims = call('EXISTS', q.o .. 'claims') == 1 and call('HMGET', q.o .. 'claims', unpack(ids)) or {}
  local jobs = {}
  for i, id in ipairs(ids) do jobs[i] = q.job .. id end
  if call('EXISTS', unpack(jobs)) > 0 then
    for i, id in ipairs(ids) do published[id] = call('EXISTS', jobs[i]) == 1 end
  end
  for i, id in ipairs(ids) do
    if values[i] and not seen[id] then
      local row = store.read_staged(values[i])
      row.id = id
      local held = row.run_id == r.id
      for _, other in ipairs(claims[i] and cmsgpack.unpack(claims[i]) or {}) do held = held or other == r.id end
      if held and published[id] then
        give_way(q, row)
      elseif held then
        row.n = number(row.seq)
        in_order = in_order and (#rows == 0 or rows[#rows].n < row.n)
        rows[#rows + 1] = row
      end
    end
    seen[id] = true
  end
  if not in_order then table.sort(rows, function(a, b) return a.n < b.n end) end
  return rows
end

-- Releases or drops up to `limit` tasks; how many.
local function settle(r, limit)
  if r.settled then return 0 end
  store.flush()
  local q, moved = r.q, 0
  local ids = call('LPOP', q.o .. 'rows:' .. r.id, limit)
  if ids then
    r.moment = digits(r.ended)
    local rows = rows_of(r, ids)
    moved = #rows
    if r.state == 'ABORTED' then
      for _, row in ipairs(rows) do disclaim(r, row) end
    elseif moved > 0 then
      release_all(r, rows)
    end
    q.staging = nil
  end
  if not ids or call('EXISTS', q.o .. 'rows:' .. r.id) == 0 then
    r.settled = true
    call('ZREM', q.o .. 'runs', r.id)
    call('ZADD', q.o .. 'ended', digits(r.ended + math.max(r.key_ttl, KEEP_MS)), r.id)
  elseif moved == 0 then
    moved = 1 -- whoever sweeps until nothing moves must not stop here
  end
  save_run(r)
  return moved
end

local function finish(r, state)
  r.state, r.ended = state, now
  call('ZADD', r.q.o .. 'runs', '0', r.id)
end

function alone.commitrun(op)
  local r = load_run(queue(op.queue), op.run)
  if not r or r.state ~= 'COMMITTED' then
    local reason = closed(r)
    if reason then return nil, 'RunClosed', reason end
    finish(r, 'COMMITTED')
  end
  settle(r, SETTLE_LIMIT)
  return info(r)
end

function alone.abortrun(op)
  local r = load_run(queue(op.queue), op.run)
  if not r then return nil, 'RunClosed', 'unknown' end
  if r.state == 'COMMITTED' then return nil, 'RunClosed', 'there' end
  if r.state == 'OPEN' then finish(r, 'ABORTED') end
  settle(r, SETTLE_LIMIT)
  return info(r)
end

-- Goes on with what runs left behind, and aborts those whose time is over.
function machine.sweep_runs(q, limit)
  local moved = 0
  limit = math.min(limit, SETTLE_LIMIT)
  for _, id in ipairs(call('ZRANGEBYSCORE', q.o .. 'runs', '-inf', NOW, 'LIMIT', 0, limit)) do
    local r = load_run(q, id)
    if r then
      if r.state == 'OPEN' then finish(r, 'ABORTED') end
      moved = moved + settle(r, limit - moved)
    else
      call('ZREM', q.o .. 'runs', id)
    end
    if moved >= limit then break end
  end
  return moved
end
