--[[
The common cases in few commands: acks and leases of plain tasks, and in `enqueues.lua` new tasks of one shape. Without the one or
the other of the first two, a worker that drains a queue keeps the server busy for almost twice as long; without the last, bulk
enqueues do.

They write the same keys as the operations do: hashes at once, and what gathers for the sorted sets as they do (`q.ahead`: of
whom; whoever reads such a hash writes the sets first). A plain task is ours, in no group, waits for nobody, nobody waits for it,
and nobody asked to cancel it. Whatever is not plain, and whatever this call has touched before, takes the long way.
]]

local ACK = {
  'state', 'lease_token', 'lock_until_ms', 'gid', 'deps', 'cancel', 'o', 'created_ms', 'attempt', 'last_started_ms', 'worker',
  'due_ms',
}

local function ack(q, op, id, token, result, data)
  local v = redis.pcall('HMGET', q.job .. id, unpack(ACK)) -- others may have stored something else there
  if v[1] ~= 'active' or v[2] ~= token or text(v[4]) or v[5] == '1' or v[6] == '1' or not v[7] then return false end
  local own, _, ttl_ms, name = store.read_origin(v[7])
  local created = v[8] -- another client that published the id again wrote its own
  if not created or own ~= created or not moment(v[9]) or v[10] and string.find(v[10], '%D') then return false end
  if op.listed and name ~= '*' then return false end
  -- with no time to live the task goes at once; a strict ack of a lease that ran out is refused: both the long way
  if ttl_ms == 0 or not (op.late or number(v[3]) > now) then return false end
  ttl_ms = ttl_ms or DEFAULT_TTL_MS
  call('HSET', q.job .. id, 'state', 'completed', 'lease_token', '', 'lock_until_ms', '', 'ended_by', token, 'completed_ms', NOW,
      'updated_ms', NOW)
  call('SET', q.o .. 'res:' .. id,
      store.result(CODE.completed, v[9], text(v[10]), created, name, '', result, op.encoding),
      'PX', TEXT[ttl_ms + GRACE_MS])
  remove(q, 'active', id)
  remove(q, 'idx:active', id)
  add(q, 'o:done', op.listed and 'inf' or TEXT[now + ttl_ms], id)
  add(q, 'idx:completed', NOW, id)
  q.completed[#q.completed + 1] = id
  ended_tasks[#ended_tasks + 1] = id
  q.finished, q.changed, q.ahead[id] = true, true, true
  if request.events then
    local created_ms = number(created)
    local due_ms = text(v[12]) and ms(v[12]) or created_ms
    log.add(q, 'succeeded', id, name, false, number(v[9]), text(v[11]) or false, created_ms, due_ms, CODE.completed, data)
  end
  return true
end

-- Acks of one queue, each a transaction of its own.
function alike.acks(op)
  local q, answers, rows, ids = queue(op.queue), {}, op.rows, {}
  for i = 1, #rows, 4 do ids[#ids + 1] = rows[i] end
  local leased = store.leased(q, ids)
  for i = 1, #rows, 4 do
    local id, token, result, data = rows[i], rows[i + 1], rows[i + 2], rows[i + 3]
    if leased[(i + 3) / 4] and cache[slot(q, id)] == nil and ack(q, op, id, token, result, data) then
      answers[#answers + 1] = 1
    else
      answers[#answers + 1] = machine.transaction({{
        kind = 'ack', queue = op.queue, id = id, token = token, late = op.late, encoding = op.encoding, result = result or nil,
        data = data, listed = op.listed,
      }})
    end
  end
  return answers
end

-- The lease of a plain task from its values; nil for any other.
function machine.lease_plain(q, id, op, values)
  if values[4] or values[7] or values[2] ~= '0' or not values[9] or cache[slot(q, id)] then return nil end
  local own, _, _, name = store.read_origin(values[9])
  if own ~= values[5] then return nil end
  local timeout_ms = op.lease or ms(values[3])
  if timeout_ms <= 0 then timeout_ms = DEFAULT_LEASE_MS end
  local until_ms = TEXT[now + timeout_ms]
  call('HSET', q.job .. id, 'state', 'active', 'attempt', '1', 'lease_token', op.token, 'lock_until_ms', until_ms,
      'first_started_ms', text(values[8]) or NOW, 'last_started_ms', NOW, 'updated_ms', NOW, 'worker', op.worker)
  values[1], values[2], values[7], values[10] = until_ms, '1', false, id -- whatever the hash says, under this name it is ended
  cache[slot(q, id)], q.ahead[id] = nil, true
  q.changed = true
  remove(q, 'idx:wait', id)
  add(q, 'active', until_ms, id)
  add(q, 'idx:active', NOW, id)
  if request.events then
    local created_ms = number(values[5])
    local due_ms = text(values[6]) and ms(values[6]) or created_ms
    log.add(q, 'started', id, name, false, 1, text(op.worker) or false, created_ms, due_ms, CODE.active, false)
  end
  return true
end
