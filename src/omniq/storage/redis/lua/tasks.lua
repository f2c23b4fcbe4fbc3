--[[
Tasks as tables, read once per call and written once.

Nothing is written while a transaction is checked. Changes gather here: fields of hashes, members of sorted sets, tails of
lanes; `store.flush` writes them with few, variadic commands. It runs at the end, and before anything that reads those keys.
]]

local store, lanes, log, machine = {}, {}, {}, {}
local check, write, alone, upkeep, alike = {}, {}, {}, {}, {} -- by kind of operation
local cache, touched = {}, {} -- tasks by queue and id, false for none; those with something to write
-- By id: the task that this call has met, whose hash may not tell yet what became of it; or the name of the queue whose books have
-- the id, though its hash may be gone; or false, where no other queue has it.
local whereabouts = {}
local spent = 0 -- of `BUDGET`
store.occupied = {} -- ids whose key holds no hash: no task can be stored under them

-- The fields of a task, as the answer to `Reserve` gives them. Most operations need only the first of them; the next ones are
-- read when they are asked for. `o` holds what never changes of a task of ours, see `store.origin`.
local FIELDS = {
  'state', 'attempt', 'timeout_ms', 'gid', 'created_ms', 'due_ms', 'lock_until_ms', 'lease_token', 'last_started_ms', 'o',
  'worker', 'cancel', 'ended_by', 'deps', 'first_started_ms',
  'eta_us', 'interval_us', 'dead_queue', 'left', 'edges', 'idempotency_key',
  'id', 'payload', 'max_attempts', 'backoff_ms', 'updated_ms', 'completed_ms', 'failed_ms', 'last_error', 'last_error_ms',
  'headers', 'blocked_by', 'error', 'progress', 'finished_ms', 'foreign',
}
local HOT, KNOWN = 15, 21
-- What a plain task has of them before its first lease. `more` marks a task that has others too. The answer has the end of the
-- lease in the place of the state.
local PLAIN = {
  'state', 'attempt', 'timeout_ms', 'gid', 'created_ms', 'due_ms', 'more', 'first_started_ms', 'o', 'id', 'payload', 'max_attempts',
}
local COLD = {eta_us = true, interval_us = true, dead_queue = true, left = true, edges = true, idempotency_key = true}
-- The sorted sets that a task is in, by state. No hash has another one: staged tasks are kept elsewhere.
local MEMBER = {
  wait = {'idx:wait'},
  delayed = {'delayed', 'idx:delayed'},
  active = {'active', 'idx:active'},
  completed = {'o:done', 'idx:completed'},
  failed = {'idx:failed'},
  blocked = {'o:blocked'},
  cancelled = {'o:cancelled'},
}
local CODE = {staged = 0, blocked = 1, delayed = 2, wait = 3, active = 4, completed = 5, failed = 6, cancelled = 7}
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
  local changes = t.changes
  local n = #changes
  changes[n + 1], changes[n + 2] = field, value
  if not t.touched then touch(t) end
end

local function clear(t, field)
  t[field] = nil
  set(t, field, '')
end

-- "created_ms seq ttl_ms name_bytes fingerprint_bytes ", the name, the fingerprint, further options as JSON. The first number
-- says whose task it is: another client that publishes the id again writes another `created_ms` beside it.
function store.origin(created_ms, seq, ttl_ms, name, fingerprint, options)
  return created_ms .. ' ' .. seq .. ' ' .. (ttl_ms and TEXT[ttl_ms] or '-') .. ' ' .. TEXT[#name] .. ' ' .. TEXT[#fingerprint]
    .. ' ' .. name .. fingerprint .. options
end

-- created_ms, seq, ttl_ms or nil, name, fingerprint; nil for what we did not write, which makes it the job of another client
function store.read_origin(o)
  local own, seq, ttl, n, f, at = string.match(o, '^(%d+) (%d+) (%S+) (%d+) (%d+) ()')
  if not own or #own > 15 or #seq > 16 then return nil end
  n, f = at + n, at + n + f
  if f >= #o or string.byte(o, f) ~= 123 then return nil end -- the options, `{`
  ttl = tonumber(ttl)
  if ttl then ttl = ms(ttl) end
  return own, seq, ttl, string.sub(o, at, n - 1), string.sub(o, n, f - 1)
end

-- Most operations need none of these fields: they are read when the first of them is asked for.
local function warm(t, v, from)
  t.warm = true
  if t.foreign then
    t.left = 0
    return
  end
  t.eta_us, t.interval_us, t.left = moment(v[from + 1]), moment(v[from + 2]), ms(v[from + 4])
  t.edges, t.idempotency_key = text(v[from + 5]), text(v[from + 6])
  local dead = text(v[from + 3])
  t.dead_queue = dead and #dead <= 128 and string.find(dead, '^[%w._-]+$') and dead or nil
end

local function warm_up(t, field)
  if not COLD[field] or rawget(t, 'warm') then return false end
  warm(t, call('HMGET', t.key, unpack(FIELDS, HOT + 1, KNOWN)), 0)
  return true
end

local Task = {
  __index = function(t, field)
    if warm_up(t, field) then return rawget(t, field) end
    return nil
  end,
  -- else what is stored would come back over what was set, or cleared, before it was read
  __newindex = function(t, field, value)
    warm_up(t, field)
    rawset(t, field, value)
  end,
}

-- A task from the values of its first fields. One in a state that we do not know is nobody's to run: like a dead letter.
function store.shape(q, id, key, v)
  local state = MEMBER[v[1]] and v[1] or 'failed'
  local t = {
    q = q, id = id, key = key, changes = {}, state = state, stored = state, attempt = ms(v[2]), timeout_ms = ms(v[3]),
    gid = text(v[4]), created_ms = ms(v[5]), due_ms = ms(v[6]), lock_until_ms = ms(v[7]), odd = state ~= v[1],
    lease_token = text(v[8]), last_started_ms = moment(v[9]), deps = v[14] == '1', first_started_ms = moment(v[15]),
    touched = false, moved = false, cancel = false, foreign = true, seq = 0, fingerprint = '',
  }
  if t.due_ms == 0 then t.due_ms = t.created_ms end
  if v[10] then
    local own, seq, ttl_ms, name, fingerprint = store.read_origin(v[10])
    if own == v[5] then
      t.foreign, t.seq, t.ttl_ms, t.name, t.fingerprint = false, number(seq), ttl_ms, name, fingerprint
      t.worker, t.cancel, t.ended_by = text(v[11]), v[12] == '1', text(v[13])
    else
      t.was_ours = true
    end
  end
  if #v > HOT then warm(t, v, HOT) end
  cache[slot(q, id)], whereabouts[id] = t, t
  return setmetatable(t, Task)
end

-- Whether the queue has staged tasks.
function store.staging(q)
  if q.staging == nil then q.staging = call('EXISTS', q.o .. 'staged') == 1 end
  return q.staging
end

-- The task of this id in this queue, or nil. Looks, and writes nothing.
function store.load(q, id)
  local t = cache[slot(q, id)]
  if t ~= nil then
    if t and t.gone then return nil end
    return t or nil
  end
  if q.ahead[id] then store.write_sets(q) end
  local key = job_key(q, id)
  local v = redis.pcall('HMGET', key, unpack(FIELDS, 1, HOT)) -- others may have stored something else there
  if not v[1] then -- cancelled tasks lie under a key of our own: no other client knows that state
    if v.err then store.occupied[slot(q, id)] = true end
    key = end_key(q, id)
    v = call('HMGET', key, unpack(FIELDS, 1, HOT))
  end
  if v[1] then return store.shape(q, id, key, v) end
  local staged = store.staging(q) and call('HGET', q.o .. 'staged', id)
  if staged then
    machine.need('staging')
    return store.shape_staged(q, id, staged)
  end
  cache[slot(q, id)] = false
  return nil
end

-- A task that another client published, or published again under our feet: from now on it is in our books too. Other clients write
-- a hash without looking whether one is there, so what is left of the task before must go.
function store.adopt(t)
  if not t.foreign then return end
  t.foreign, t.adopted = false, true
  local q = t.q
  local payload = call('HGET', t.key, 'payload') or ''
  local parsed, body = pcall(cjson.decode, payload)
  local name = parsed and type(body) == 'table' and body.func
  t.name = type(name) == 'string' and #name <= 1024 and is_text(name) and name or '*'
  t.seq = next_seq(q)
  if t.was_ours then
    for _, field in ipairs({
      'worker', 'cancel', 'ended_by', 'eta_us', 'interval_us', 'dead_queue', 'left', 'edges', 'idempotency_key', 'headers',
      'blocked_by', 'error', 'progress', 'finished_ms', 'more',
    }) do set(t, field, '') end
    call('DEL', end_key(q, t.id), q.o .. 'res:' .. t.id)
    for _, name in ipairs({'done', 'cancelled', 'results'}) do call('ZREM', q.o .. name, t.id) end
  end
  local created = digits(t.created_ms)
  set(t, 'o', store.origin(created, digits(t.seq), nil, t.name, '', '{}'))
  set(t, 'created_ms', created)
  set(t, 'foreign', '1')
  call('ZADD', q.o .. 'tasks', digits(t.seq), t.id)
  if t.gid then
    lanes.mark_grouped(q, t.gid)
    call('DEL', q.o .. 'rest:' .. t.gid)
  end
  log.note(t, 'enqueued', '{"foreign":true,"payload_bytes":' .. #payload .. '}', 'wait')
end

-- A task is gone once everything is written; what it was in is left behind at once.
function store.drop(t, with_key)
  local q = t.q
  if t.state == 'blocked' then machine.forget_blockers(t) end
  if t.state == 'completed' or t.state == 'failed' then
    store.flush()
    call('LREM', q.base .. t.state, 1, t.id)
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

-- The ends of these tasks' leases, by the set that every client reaps by. A hash may say that its task runs when others have ended the lease.
function store.leased(q, ids)
  if q.add.active then store.flush() end -- what this call has leased before
  local found = {}
  for i = 1, #ids, PART do
    for _, score in ipairs(call('ZMSCORE', q.base .. 'active', unpack(ids, i, math.min(i + PART - 1, #ids)))) do
      found[#found + 1] = score
    end
  end
  return found
end

-- -- results and keys ----------------------------------------------------------------------------

-- `base:o:res:<id>`: how the last run ended. A line of state, moment, attempt, start, creation, length of the name and of the error,
-- whether there is a result, and its encoding; then name, error and result.
function store.result(code, attempt, started_ms, created_ms, name, failure, data, encoding)
  return code .. ' ' .. NOW .. ' ' .. attempt .. ' ' .. (started_ms or '-') .. ' ' .. created_ms .. ' ' .. TEXT[#name] .. ' '
    .. TEXT[#failure] .. (data and ' 1 ' or ' 0 ') .. (encoding or 'json') .. '\n' .. name .. failure .. (data or '')
end

-- `stays`: the result lives as long as its dead letter.
function store.save_result(t, code, result, stays, ttl_ms)
  local q, key = t.q, t.q.o .. 'res:' .. t.id
  local value = store.result(code, TEXT[t.attempt], t.last_started_ms, digits(t.created_ms), t.name, result.error or '', result.data,
                             result.encoding)
  if stays then
    call('SET', key, value)
    call('ZREM', q.o .. 'results', t.id)
  else
    call('SET', key, value, 'PX', digits(ttl_ms + GRACE_MS))
    t.expires_ms = now + ttl_ms
    if not result.ends then call('ZADD', q.o .. 'results', digits(t.expires_ms), t.id) end
  end
end

function store.delete_result(t)
  call('DEL', t.q.o .. 'res:' .. t.id)
  call('ZREM', t.q.o .. 'results', t.id)
end

function store.key(q, key)
  local found = call('GET', q.o .. 'key:' .. key)
  if not found then return nil end
  local id, fingerprint, expires_ms = unpack(cmsgpack.unpack(found))
  return {id = id, fingerprint = fingerprint, expires_ms = expires_ms}
end

function store.save_key(q, key, id, fingerprint, expires_ms)
  call('SET', q.o .. 'key:' .. key, cmsgpack.pack({id, fingerprint, expires_ms}))
  call('ZADD', q.o .. 'keys', digits(expires_ms), key)
end

function store.delete_key(q, key)
  call('DEL', q.o .. 'key:' .. key)
  call('ZREM', q.o .. 'keys', key)
end

-- -- writing ---------------------------------------------------------------------------------------

local function score_of(t, name)
  if name == 'delayed' then return digits(t.due_ms) end
  if name == 'active' then return digits(t.lock_until_ms) end
  if name == 'o:done' and t.listed then return 'inf' end
  if name == 'o:done' or name == 'o:cancelled' then return digits(t.expires_ms or now) end
  if name == 'o:blocked' then return digits(t.seq) end
  return t.since and digits(t.since) or NOW
end

local dirty = {} -- queues with something gathered

local function add(q, name, score, id)
  local list = q.add[name]
  if not list then
    list = {}
    q.add[name], dirty[q] = list, true
  end
  local n = #list
  list[n + 1], list[n + 2] = score, id
end

local function remove(q, name, id)
  local list = q.remove[name]
  if not list then
    list = {}
    q.remove[name], dirty[q] = list, true
  end
  list[#list + 1] = id
end

local function write_hash(t)
  local changes = t.changes
  if #changes > 0 then
    call('HSET', t.key, unpack(changes))
    t.changes = {}
  end
  if t.state == 'cancelled' and t.stored ~= 'cancelled' then
    call('RENAME', t.key, end_key(t.q, t.id))
    t.key = end_key(t.q, t.id)
  end
end

-- The contract lists 100 completed jobs and deletes what drops out. A task of ours only leaves the list: its hash stays as long as
-- its result. One that was published anew meanwhile is not touched either.
local function write_completed(q)
  in_parts('LPUSH', q.base .. 'completed', q.completed)
  q.completed = {}
  local extra = call('LLEN', q.base .. 'completed') - COMPLETED_KEEP
  if extra <= 0 then return end
  local out = call('RPOP', q.base .. 'completed', extra)
  for i = 1, #out, PART do
    local last = math.min(i + PART - 1, #out)
    local ours = call('ZMSCORE', q.o .. 'done', unpack(out, i, last))
    for k = i, last do
      local id = out[k]
      local expires = ours[k - i + 1]
      remove(q, 'idx:completed', id)
      if (not expires or expires == 'inf') and redis.pcall('HGET', job_key(q, id), 'state') == 'completed' then
        call('DEL', job_key(q, id), q.o .. 'res:' .. id)
        remove(q, 'o:done', id)
        remove(q, 'o:tasks', id)
        cache[slot(q, id)] = false
      end
    end
  end
end

function store.write_sets(q)
  local done = 'idx:completed' -- grows before it shrinks: more than 128 members, and it stops being a list that is searched
  if q.add[done] then in_parts('ZADD', q.base .. done, q.add[done]) end
  q.add[done] = nil
  for name, members in pairs(q.remove) do in_parts('ZREM', q.base .. name, members) end
  for name, members in pairs(q.add) do in_parts('ZADD', q.base .. name, members) end
  q.add, q.remove, q.ahead = {}, {}, {}
end

function store.flush()
  lanes.push_all()
  local list = touched
  touched = {}
  for _, t in ipairs(list) do
    t.touched = false
    t.q.changed = true
    if t.gone then
      call('DEL', job_key(t.q, t.id), end_key(t.q, t.id))
      remove(t.q, 'o:tasks', t.id)
    else
      write_hash(t)
    end
  end
  for _, t in ipairs(list) do
    local q, state, stored = t.q, not t.gone and t.state or nil, t.stored
    if stored and stored ~= state and MEMBER[stored] then
      for _, name in ipairs(MEMBER[stored]) do remove(q, name, t.id) end
    end
    if state and (t.moved or stored ~= state) and MEMBER[state] then
      for _, name in ipairs(MEMBER[state]) do
        -- a beat moves the end of a lease, not the moment since when the task runs
        if name ~= 'idx:active' or stored ~= state then add(q, name, score_of(t, name), t.id) end
      end
    end
    if state and not stored then add(q, 'o:tasks', digits(t.seq), t.id) end
    t.stored, t.moved, t.since = state, false, nil
  end
  local changed = dirty
  dirty = {}
  for q in pairs(changed) do
    store.write_sets(q)
    if #q.failed > 0 then
      in_parts('LPUSH', q.base .. 'failed', q.failed)
      q.failed = {}
    end
    if #q.completed > 0 then
      write_completed(q)
      store.write_sets(q)
    end
  end
end
