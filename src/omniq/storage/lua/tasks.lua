--[[
Tasks as tables, read once per call and written once.

Nothing is written while a transaction is checked. Changes gather here: fields of hashes, members of sorted sets, tails of
lanes; `store.flush` writes them with few, variadic commands. It runs at the end, and before anything that reads those keys.
]]

local store, lanes, log, machine = {}, {}, {}, {}
local cache, touched = {}, {}

local FIELDS = {
  'state', 'attempt', 'timeout_ms', 'gid', 'created_ms', 'due_ms', 'lock_until_ms', 'lease_token', 'first_started_ms',
  'last_started_ms', 'own', 'seq', 'name', 'worker', 'cancel', 'ended_by', 'eta_us', 'interval_us', 'result_ttl_us',
  'dead_queue', 'left', 'deps', 'edges', 'idempotency_key', 'fingerprint',
}
local PRIVATE = {
  'name', 'worker', 'cancel', 'ended_by', 'eta_us', 'interval_us', 'result_ttl_us', 'dead_queue', 'left', 'edges',
  'idempotency_key', 'fingerprint',
}
local UNREAD = {
  'encoding', 'headers', 'origin', 'timeout_us', 'backoff', 'blocked_by', 'error', 'progress', 'finished_ms', 'auto',
}

-- The sorted sets that a task is in, by state.
local MEMBER = {
  wait = {'idx:wait'},
  delayed = {'delayed', 'idx:delayed'},
  active = {'active', 'idx:active'},
  completed = {'o:done', 'idx:completed'},
  failed = {'idx:failed'},
  blocked = {'o:blocked'},
  cancelled = {'o:cancelled'},
}
local CODE = {blocked = 1, delayed = 2, wait = 3, active = 4, completed = 5, failed = 6, cancelled = 7}
local FINAL = {completed = true, failed = true, cancelled = true}
local WAITING = {blocked = true, delayed = true, wait = true}

local function slot(q, id) return q.name .. '\0' .. id end

local function touch(t)
  if not t.touched then
    t.touched = true
    touched[#touched + 1] = t
  end
end

local function set(t, field, value)
  t.dirty[field] = value
  touch(t)
end

local function clear(t, field)
  t[field] = nil
  set(t, field, '')
end

function store.shape(q, id, key, v)
  local t = {
    q = q, id = id, key = key, dirty = {}, state = v[1], stored = v[1], attempt = number(v[2]), timeout_ms = number(v[3]),
    gid = text(v[4]), created_ms = number(v[5]), due_ms = number(v[6]), lock_until_ms = number(v[7]),
    lease_token = text(v[8]), first_started_ms = text(v[9]), last_started_ms = text(v[10]), seq = number(v[12]),
  }
  if t.due_ms == 0 then t.due_ms = t.created_ms end
  t.foreign = not (v[11] and v[11] == v[5])
  if t.foreign then
    t.was_ours = v[11]
  else
    t.name, t.worker, t.cancel, t.ended_by, t.eta_us = v[13] or '*', text(v[14]), v[15] == '1', text(v[16]), text(v[17])
    t.interval_us, t.result_ttl_us, t.dead_queue, t.left = text(v[18]), text(v[19]), text(v[20]), number(v[21])
    t.edges, t.idempotency_key, t.fingerprint = text(v[23]), text(v[24]), v[25] or ''
  end
  t.deps = v[22] == '1'
  cache[slot(q, id)] = t
  return t
end

-- The task of this id in this queue, or nil. Looks, and writes nothing.
function store.load(q, id)
  local t = cache[slot(q, id)]
  if t ~= nil then
    if t and t.gone then return nil end
    return t or nil
  end
  local key = job_key(q, id)
  local v = run('HMGET', key, unpack(FIELDS))
  if not v[1] then
    key = end_key(q, id)
    v = run('HMGET', key, unpack(FIELDS))
  end
  if not v[1] then
    cache[slot(q, id)] = false
    return nil
  end
  return store.shape(q, id, key, v)
end

local known

-- Every queue that was ever heard of. On a cluster other queues are on other nodes, and ids are unique per queue only.
local function all_queues()
  if not known then
    known = {}
    if not request.cluster then
      for _, name in ipairs(run('SMEMBERS', STORE .. 'queues')) do known[name] = true end
    end
  end
  return known
end

-- The task of this id, in this queue or in the one that it moved to, or anywhere if the store has only one node.
function store.find(q, id)
  local t = store.load(q, id)
  if t or request.cluster then return t end
  for name in pairs(queues) do
    local cached = cache[name .. '\0' .. id]
    if cached and not cached.gone then return cached end
  end
  local names, keys = {}, {}
  for name in pairs(all_queues()) do
    if name ~= q.name then
      names[#names + 1] = name
      keys[#keys + 1] = '{' .. name .. '}:job:' .. id
      keys[#keys + 1] = '{' .. name .. '}:o:end:' .. id
    end
  end
  for i = 1, #keys, PART do
    if run('EXISTS', unpack(keys, i, math.min(i + PART - 1, #keys))) > 0 then
      for _, name in ipairs(names) do
        t = store.load(queue(name), id)
        if t then return t end
      end
    end
  end
  return nil
end

-- A task that another client published, or published again under our feet: from now on it is in our books too.
function store.adopt(t)
  if not t.foreign then return end
  t.foreign = false
  local q = t.q
  local payload = run('HGET', t.key, 'payload') or ''
  local parsed, body = pcall(cjson.decode, payload)
  local name = parsed and type(body) == 'table' and body.func
  t.name = type(name) == 'string' and name ~= '' and #name <= 1024 and name or '*'
  t.left, t.fingerprint, t.seq = 0, '', next_seq(q)
  if t.was_ours then
    for _, field in ipairs(PRIVATE) do set(t, field, '') end
    for _, field in ipairs(UNREAD) do set(t, field, '') end
    run('DEL', end_key(q, t.id), q.o .. 'res:' .. t.id)
    for _, name in ipairs({'done', 'cancelled', 'results'}) do run('ZREM', q.o .. name, t.id) end
  end
  set(t, 'own', digits(t.created_ms))
  set(t, 'created_ms', digits(t.created_ms))
  set(t, 'seq', digits(t.seq))
  set(t, 'name', t.name)
  set(t, 'foreign', '1')
  run('ZADD', q.o .. 'tasks', digits(t.seq), t.id)
  if t.gid then q.lanes[t.gid] = true end
  log.note(t, 'enqueued', '{"foreign":true,"payload_bytes":' .. #payload .. '}', 'wait')
end

-- A task is gone once everything is written; what it was in is left behind at once.
function store.drop(t, with_key)
  local q = t.q
  if t.state == 'blocked' then machine.forget_blockers(t) end
  if t.state == 'completed' or t.state == 'failed' then
    store.flush()
    run('LREM', q.base .. t.state, 1, t.id)
  end
  lanes.leave(t)
  if t.gid then lanes.look(lanes.group(q, t.gid)) end
  store.delete_result(t)
  if with_key and t.idempotency_key then
    local key = store.key(q, t.idempotency_key)
    if key and key.id == t.id then store.delete_key(q, t.idempotency_key) end
  end
  t.gone = true
  touch(t)
end

-- -- results and keys ----------------------------------------------------------------------------

-- `stays`: the result lives as long as its dead letter.
function store.save_result(t, code, result, stays, ttl_ms)
  local q, key = t.q, t.q.o .. 'res:' .. t.id
  local failure = result.error or ''
  local head = table.concat({
    code, digits(now), t.attempt, t.last_started_ms or '-', #failure, result.data and 1 or 0, result.encoding or 'json',
  }, ' ')
  local value = head .. '\n' .. failure .. (result.data or '')
  if stays then
    run('SET', key, value)
    run('ZREM', q.o .. 'results', t.id)
  else
    run('SET', key, value, 'PX', digits(ttl_ms + GRACE_MS))
    t.expires_ms = now + ttl_ms
    if not result.ends then run('ZADD', q.o .. 'results', digits(t.expires_ms), t.id) end
  end
end

function store.delete_result(t)
  run('DEL', t.q.o .. 'res:' .. t.id)
  run('ZREM', t.q.o .. 'results', t.id)
end

function store.key(q, key)
  local found = run('GET', q.o .. 'key:' .. key)
  if not found then return nil end
  local id, fingerprint, expires_ms = unpack(cmsgpack.unpack(found))
  return {id = id, fingerprint = fingerprint, expires_ms = expires_ms}
end

function store.save_key(q, key, id, fingerprint, expires_ms)
  run('SET', q.o .. 'key:' .. key, cmsgpack.pack({id, fingerprint, expires_ms}))
  run('ZADD', q.o .. 'keys', digits(expires_ms), key)
end

function store.delete_key(q, key)
  run('DEL', q.o .. 'key:' .. key)
  run('ZREM', q.o .. 'keys', key)
end

-- -- writing ---------------------------------------------------------------------------------------

local function score_of(t, name)
  if name == 'delayed' then return t.due_ms end
  if name == 'active' then return t.lock_until_ms end
  if name == 'o:done' or name == 'o:cancelled' then return t.expires_ms or now end
  if name == 'o:blocked' then return t.seq end
  return now
end

local function gather(into, key, ...)
  local list = into[key]
  if not list then
    list = {}
    into[key] = list
  end
  for _, value in ipairs({...}) do list[#list + 1] = value end
end

local function write_hash(t)
  local values = t.fresh or {}
  t.fresh = nil
  for field, value in pairs(t.dirty) do
    values[#values + 1] = field
    values[#values + 1] = value
  end
  t.dirty = {}
  if #values > 0 then run('HSET', t.key, unpack(values)) end
  if t.state == 'cancelled' and t.stored ~= 'cancelled' then
    run('RENAME', t.key, end_key(t.q, t.id))
    t.key = end_key(t.q, t.id)
  end
end

-- The contract keeps 100 completed jobs; the record itself stays under a key of ours for as long as its result.
local function write_completed(q, removals)
  local ids = {}
  for _, t in ipairs(q.completed) do ids[#ids + 1] = t.id end
  in_parts('LPUSH', q.base .. 'completed', ids)
  local extra = run('LLEN', q.base .. 'completed') - COMPLETED_KEEP
  local cut = {}
  if extra > 0 then
    for _, id in ipairs(run('RPOP', q.base .. 'completed', extra)) do cut[id] = true end
  end
  for _, t in ipairs(q.completed) do
    if cut[t.id] then
      cut[t.id], t.trimmed = nil, true
      run('RENAME', t.key, end_key(q, t.id))
      t.key = end_key(q, t.id)
    else
      run('COPY', t.key, end_key(q, t.id), 'REPLACE')
    end
  end
  for id in pairs(cut) do
    gather(removals, q.base .. 'idx:completed', id)
    if run('HGET', job_key(q, id), 'state') == 'completed' then run('DEL', job_key(q, id)) end
  end
  q.completed = {}
end

function store.flush()
  lanes.push_all()
  if #touched == 0 then return end
  local additions, removals, list = {}, {}, touched
  touched = {}
  for _, t in ipairs(list) do
    t.touched = false
    t.q.changed = true
    if t.gone then
      run('DEL', job_key(t.q, t.id), end_key(t.q, t.id))
      gather(removals, t.q.o .. 'tasks', t.id)
    else
      write_hash(t)
    end
  end
  for _, q in pairs(queues) do
    if #q.completed > 0 then write_completed(q, removals) end
    if #q.failed > 0 then
      in_parts('LPUSH', q.base .. 'failed', q.failed)
      q.failed = {}
    end
  end
  for _, t in ipairs(list) do
    local state = not t.gone and t.state or nil
    if t.stored and t.stored ~= state then
      for _, name in ipairs(MEMBER[t.stored] or {}) do gather(removals, t.q.base .. name, t.id) end
    end
    if state and (t.moved or t.stored ~= state) then
      for _, name in ipairs(MEMBER[state] or {}) do
        if not (t.trimmed and name == 'idx:completed') then
          gather(additions, t.q.base .. name, digits(score_of(t, name)), t.id)
        end
      end
    end
    if not t.stored and state then gather(additions, t.q.o .. 'tasks', digits(t.seq), t.id) end
    t.stored, t.moved = state, false
  end
  for key, members in pairs(removals) do in_parts('ZREM', key, members) end
  for key, pairs_ in pairs(additions) do in_parts('ZADD', key, pairs_) end
end
