--[[
Jobs that nobody can read. They leave every lane and set, so that all others go on: to the dead letters, with an error that says
what is wrong; or, where no program could name them, to nothing but `o:corrupt`, with their key left as it is.
]]

local SETS = {'active', 'delayed', 'idx:wait', 'idx:active', 'idx:delayed', 'o:blocked'}

local function shown(value)
  return '"' .. string.gsub(string.sub(value or '', 1, 40), '[%c"\\\127-\255]', '?') .. '"'
end

local function note(q, id, why)
  call('HSET', q.o .. 'corrupt', id, NOW .. ' ' .. why)
end

local function make_dead_letter(t, why)
  local message = why .. '; requeue it when that was corrected, or delete it'
  local failure = '{"type":"Unreadable","message":' .. cjson.encode(message) .. ',"traceback":""}'
  machine.forget_blockers(t)
  t.dead_queue = nil
  store.adopt(t)
  if t.gid then t.q.lanes[t.gid] = true end
  machine.set_error(t, failure, 'Unreadable: ' .. message)
  machine.finish(t, 'failed', {error = failure}, nil, nil)
  log.note(t, 'failed', log.with(nil, 'error', log.brief(failure)), 'failed')
  note(t.q, t.id, why)
  if t.deps then machine.cascade({t}) end
end

-- `why` is asked for where the state of the task is a good one.
function machine.put_aside(q, id, why)
  store.flush()
  local key = job_key(q, id)
  local length = redis.pcall('HLEN', key)
  for _, name in ipairs(SETS) do call('ZREM', q.base .. name, id) end
  q.changed = true
  if length == 0 then
    if not store.load(q, id) then call('ZREM', q.o .. 'tasks', id) end
  elseif type(length) == 'number' and is_text(id) then
    local v = call('HMGET', key, unpack(FIELDS, 1, KNOWN))
    local t = store.shape(q, id, key, v)
    if t.odd then t.state, t.stored = nil, nil end
    make_dead_letter(t, why or 'its state is ' .. shown(v[1] or nil) .. ', which is none')
  else
    local what = type(length) == 'number' and 'its id is no text in UTF-8 without NUL' or 'its key holds no hash'
    note(q, id, what .. '; delete its key when you have read it')
    cache[slot(q, id)] = false
    call('ZREM', q.o .. 'tasks', id)
  end
end

-- The group of a job whose key may hold anything.
function machine.gid_of(q, id)
  local gid = redis.pcall('HGET', job_key(q, id), 'gid')
  return type(gid) == 'string' and text(gid) or nil
end
