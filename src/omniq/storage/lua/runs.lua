--[[
The common cases in few commands: enqueues of one shape, acks and leases of plain tasks.

They write the same keys as the operations do. A plain task is ours, in no group, waits for nobody, nobody waits for it, and
nobody asked to cancel it. Whatever is not plain, and whatever this call has touched before, takes the long way.
]]

local runs = {}

local function expand(op, i)
  local fields = {'id', op.rows[i], 'payload', op.rows[i + 1], 'fingerprint', op.rows[i + 2]}
  for _, value in ipairs(op.fields) do fields[#fields + 1] = value end
  return {
    kind = 'enqueue', queue = op.queue, id = op.rows[i], name = op.name, fields = fields, lease = op.lease,
    fingerprint = op.rows[i + 2], on_conflict = op.on_conflict, result_ttl_us = op.result_ttl_us,
    data = '{"payload_bytes":' .. (op.empty and 0 or #op.rows[i + 1]) .. '}',
  }
end

local function insert(q, op, common, i)
  local id, payload, seq = op.rows[i], op.rows[i + 1], digits(next_seq(q))
  run('HSET', q.job .. id, 'id', id, 'payload', payload, 'fingerprint', op.rows[i + 2], 'seq', seq, unpack(common))
  lanes.push(q.base .. 'wait', id)
  add(q, 'idx:wait', NOW, id)
  add(q, 'o:tasks', seq, id)
  cache[slot(q, id)] = nil
  if request.events then
    q.events[#q.events + 1] = {
      'enqueued', id, op.name, false, 0, false, now, now, CODE.wait,
      '{"payload_bytes":' .. (op.empty and 0 or #payload) .. '}',
    }
  end
end

-- Tasks that differ in id, payload and fingerprint only, which `rows` holds. Together they are one transaction, or each is one.
function runs.enqueues(op)
  local q, answers, rows = queue(op.queue), {}, op.rows
  local common = {
    'state', 'wait', 'attempt', '0', 'created_ms', NOW, 'queued_ms', NOW, 'updated_ms', NOW, 'own', NOW, 'due_ms', NOW,
    'first_started_ms', '', 'last_started_ms', '', 'completed_ms', '', 'failed_ms', '',
  }
  for _, value in ipairs(op.fields) do common[#common + 1] = value end
  if op.together then
    for i = 1, #rows, 3 do
      if store.find(q, rows[i]) then
        local ops = {}
        for k = 1, #rows, 3 do ops[#ops + 1] = expand(op, k) end
        return machine.transaction(ops)
      end
    end
  end
  machine.promote(q, PROMOTE_LIMIT)
  for i = 1, #rows, 3 do
    if not op.together and store.find(q, rows[i]) then
      answers[#answers + 1] = machine.transaction({expand(op, i)})
    else
      insert(q, op, common, i)
      answers[#answers + 1] = 1
    end
  end
  q.enqueued, q.changed, ready_queues[q.name] = true, true, true
  if op.together then return {} end
  return answers
end

local ACK = {
  'state', 'lease_token', 'lock_until_ms', 'gid', 'deps', 'cancel', 'own', 'created_ms', 'result_ttl_us', 'attempt',
  'last_started_ms', 'name', 'worker', 'due_ms',
}

local function ack(q, op, id, token, result, data)
  local v = run('HMGET', q.job .. id, unpack(ACK))
  local ttl_ms = text(v[9]) and math.ceil(v[9] / 1000) or DEFAULT_TTL_MS
  local plain = v[1] == 'active' and v[2] == token and v[7] == v[8] and not text(v[4]) and v[5] ~= '1' and v[6] ~= '1'
  if not plain or ttl_ms == 0 or not (op.late or number(v[3]) > now) then return false end
  run('HSET', q.job .. id, 'state', 'completed', 'lease_token', '', 'lock_until_ms', '', 'ended_by', token, 'finished_ms', NOW,
      'completed_ms', NOW, 'updated_ms', NOW)
  local head = '5 ' .. NOW .. ' ' .. v[10] .. ' ' .. (text(v[11]) or '-') .. ' ' .. v[8] .. ' ' .. #v[12]
  run('SET', q.o .. 'res:' .. id, head .. (result and ' 0 1 ' or ' 0 0 ') .. op.encoding .. '\n' .. v[12] .. (result or ''),
      'PX', digits(ttl_ms + GRACE_MS))
  remove(q, 'active', id)
  remove(q, 'idx:active', id)
  add(q, 'o:done', digits(now + ttl_ms), id)
  add(q, 'idx:completed', NOW, id)
  q.completed[#q.completed + 1] = id
  ended_tasks[#ended_tasks + 1] = id
  if request.events then
    q.events[#q.events + 1] = {
      'succeeded', id, v[12], false, number(v[10]), text(v[13]) or false, number(v[8]), number(v[14]), CODE.completed, data,
    }
  end
  return true
end

-- Acks of one queue, each a transaction of its own.
function runs.acks(op)
  local q, answers, rows = queue(op.queue), {}, op.rows
  for i = 1, #rows, 4 do
    local id, token, result, data = rows[i], rows[i + 1], rows[i + 2], rows[i + 3]
    if cache[slot(q, id)] == nil and ack(q, op, id, token, result, data) then
      answers[#answers + 1] = 1
    else
      answers[#answers + 1] = machine.transaction({{
        kind = 'ack', queue = op.queue, id = id, token = token, late = op.late, encoding = op.encoding, result = result or nil,
        data = data,
      }})
    end
  end
  q.finished, q.changed = true, true
  return answers
end

-- The lease of a plain task from its values; nil for any other.
function machine.lease_plain(q, id, op, values)
  if values[4] or values[10] ~= values[5] or values[19] or values[2] ~= '0' or cache[slot(q, id)] then return nil end
  local timeout_ms = op.lease or number(values[3])
  if timeout_ms <= 0 then timeout_ms = DEFAULT_LEASE_MS end
  local until_ms = digits(now + timeout_ms)
  local first = text(values[17]) or NOW
  run('HSET', q.job .. id, 'state', 'active', 'attempt', '1', 'lease_token', op.token, 'lock_until_ms', until_ms,
      'first_started_ms', first, 'last_started_ms', NOW, 'updated_ms', NOW, 'worker', op.worker)
  values[1], values[2], values[8], values[7], values[17] = 'active', '1', op.token, until_ms, first
  values[9], values[20], values[12] = NOW, NOW, op.worker
  cache[slot(q, id)] = nil
  q.changed = true
  remove(q, 'idx:wait', id)
  add(q, 'active', until_ms, id)
  add(q, 'idx:active', NOW, id)
  if request.events then
    q.events[#q.events + 1] = {
      'started', id, values[11], false, 1, text(op.worker) or false, number(values[5]), number(values[6]),
      CODE.active, false,
    }
  end
  return true
end
